"""Groups of trainers: what one of them is within, and how several are started."""

import contextlib
import signal

import torch
import torch.distributed as dist

from tests.support.ports import draw_port


@contextlib.contextmanager
def alone():
    """Be the only trainer of a group."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@contextlib.contextmanager
def trainer_of_group(rank, size, file, backend="gloo"):
    """Be one of the trainers that meet by a file, in one thread."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(file), size)
    dist.init_process_group(backend, rank=rank, world_size=size, store=store)
    yield
    dist.destroy_process_group()


def run_trainers(processes, target, *arguments, size=2, **settings):
    """Start trainers, each with its rank, as processes that must all end well."""
    trainers = [
        processes.start(f"trainer {rank}", target, rank, *arguments, **settings)
        for rank in range(size)
    ]
    for trainer in trainers:
        assert trainer.status() == 0, trainer.output()


def start_group(processes, name, life, target, *arguments, size=2, **variables):
    """Start all trainers of a group, as torchrun does; return them."""
    port = draw_port()
    return [
        processes.start(
            f"{name} {rank} of life {life}",
            target,
            *(
                argument(rank) if callable(argument) else argument
                for argument in arguments
            ),
            env={
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RESTART_COUNT": str(life),
                **variables,
            },
        )
        for rank in range(size)
    ]


def run_group_to_a_kill(
    processes, name, target, *arguments, life=0, size=2, **variables
):
    """Start a group whose last trainer is killed; end the others, too."""
    trainers = start_group(
        processes, name, life, target, *arguments, size=size, **variables
    )
    assert trainers[-1].status() == -signal.SIGKILL, trainers[-1].output()
    for other in trainers[:-1]:  # as torchrun does
        with contextlib.suppress(ProcessLookupError):
            other.send(signal.SIGKILL)
        other.status()


def run_through_a_kill(processes, name, target, *arguments, size=2, **variables):
    """Start a group whose last trainer is killed, and start it again."""
    run_group_to_a_kill(processes, name, target, *arguments, size=size, **variables)
    return run(processes, name, target, *arguments, life=1, size=size, **variables)


def run(processes, name, target, *arguments, life=0, size=2, **variables):
    """Run a group to its end; return what it printed."""
    trainers = start_group(
        processes, name, life, target, *arguments, size=size, **variables
    )
    for trainer in trainers:
        assert trainer.status() == 0, trainer.output()
    return [trainer.output() for trainer in trainers]
