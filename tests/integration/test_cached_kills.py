"""Servers that are killed while a model with cached rows trains, and started again."""

import contextlib
import os
import random
import signal
import threading
from contextlib import ExitStack, closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from persia_torchrec import (
    Cache,
    EmbeddingClient,
    EmbeddingCluster,
    remote_sharders,
)
from persia_torchrec.errors import RemoteError, RequestTimeoutError
from tests.integration.cached import (
    ROWWISE,
    Twins,
    make_batches,
    make_model,
    one_table,
    step,
    touched,
    train_and_die,
    train_and_wait,
    write_zeros,
)
from tests.support.groups import alone, start_group
from tests.support.processes import DEADLINE_S, Processes, wait_until
from tests.support.remote_job import Servers, shard

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


class KillableJob(ExitStack):
    """Two server processes that are started again, and this process as the trainer."""

    def __enter__(self):
        cluster = EmbeddingCluster.local(servers=2, capacity=50_000, restarts=True)
        self.cluster = self.enter_context(cluster)
        self.client = EmbeddingClient.connect(
            self.cluster.addresses, timeout_s=DEADLINE_S, recovery_s=DEADLINE_S
        )
        self.enter_context(closing(self.client))
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        self.callback(dist.destroy_process_group)
        return self

    def shard(self, model, sharders):
        self.callback(lambda: [s.close() for s in [sharders]])
        return shard(model, *sharders)

    def kill(self, server, *, loses_memory=False):
        process = self.cluster.processes[server]
        if loses_memory:
            os.truncate(self.cluster.kept[server].memory, 0)
        process.kill()
        wait_until(
            lambda: self.cluster.processes[server].pid != process.pid, "it is restarted"
        )


def test_no_update_is_lost_while_servers_are_killed():
    batches, draw = make_batches(60), random.Random(0)
    with KillableJob() as job:
        twins = Twins(job, staleness=2, rows=900)
        expected, losses = twins.losses(twins.plain, batches), []
        for n, batch in enumerate(batches):
            if n % 30 == 5:  # within the step, or the next ones
                process = job.cluster.processes[draw.randrange(2)]
                threading.Timer(draw.uniform(0, 0.03), process.kill).start()
            losses += list(twins.losses(twins.remote, [batch]))
        twins.require_equal(batches, losses, expected)


@pytest.mark.long
def test_cached_rows_survive_a_server_that_comes_back_without_its_memory():
    batches = make_batches(30)
    with KillableJob() as job:
        twins = Twins(job, rows=20_000)
        losses = list(twins.losses(twins.remote, batches[:15]))
        twins.sharders.flush()  # all are clean
        job.kill(0, loses_memory=True)
        job.kill(1, loses_memory=True)
        losses += list(twins.losses(twins.remote, batches[:15]))  # no row is new
        expected = twins.losses(twins.plain, batches[:15] * 2)
        twins.require_equal(batches[:15] * 2, losses, expected)


@pytest.mark.parametrize("is_written", [False, True])
def test_what_cannot_be_written_is_told(caplog, is_written):
    with alone(), Servers(2) as servers:
        client = EmbeddingClient.connect(servers.addresses, timeout_s=1.0)
        twins = Twins(SimpleNamespace(client=client, shard=lambda m, s: shard(m, *s)))
        twins.losses(twins.remote, make_batches(3))
        if is_written:
            twins.sharders.flush()
        num_dirty = sum(p.map.counters.num_dirty for p in twins.cache.pools)
        assert is_written == (num_dirty == 0)
        servers.stop()
        client.close()
    lost = f"updates of {num_dirty} cached rows are lost: "
    assert (lost in caplog.text) is not is_written
    assert ("cached tables could not be disowned: " in caplog.text) is is_written


def test_a_server_that_does_not_answer_in_time_costs_no_update(monkeypatch):
    with alone(), EmbeddingCluster.local(servers=1, capacity=1000) as cluster:
        [server] = cluster.processes

        def fails(call, *args):
            server.send_signal(signal.SIGSTOP)
            try:
                with monkeypatch.context() as patch:
                    patch.setattr(client, "timeout_s", 0.5)
                    with pytest.raises(RequestTimeoutError):
                        call(*args)
            finally:
                server.send_signal(signal.SIGCONT)

        with closing(EmbeddingClient.connect(cluster.addresses)) as client:
            model, sharders = one_table(client, cache=Cache(rows=3))
            write_zeros(client)
            step(model, 1, 2, 3)
            fails(sharders.flush)
            step(model, 1, 2, 3)
            fails(step, model, 4, 5, 6)  # in the slots of these
            step(model, 1, 2, 3)
            assert (client.read("user", np.arange(1, 4, dtype="u8")) == -1.5).all()


def test_a_fork_of_a_trainer_writes_nothing_and_ends_at_a_signal(caplog):
    with alone(), Servers(2) as servers:
        client = EmbeddingClient.connect(servers.addresses)
        twins = Twins(SimpleNamespace(client=client, shard=lambda m, s: shard(m, *s)))
        twins.losses(twins.remote, make_batches(1))
        child = os.fork()
        if not child:
            with contextlib.suppress(SystemExit):
                twins.cache.close()  # as at the end of a process
                if "rows are lost" not in caplog.text:
                    os.kill(os.getpid(), signal.SIGTERM)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
        client.close()


@pytest.mark.long
def test_a_trainer_that_is_killed_ends_as_one_that_was_not(tmp_path):
    learnt = {}
    for at in (0, 17):
        with Servers(2) as servers, Processes(tmp_path) as processes:
            given = train_and_die, servers.addresses, tmp_path, at
            for life in range(2 if at else 1):
                [trainer] = start_group(processes, f"{at}", life, *given, size=1)
                ends = -signal.SIGKILL if at and not life else 0
                assert trainer.status() == ends, trainer.output()
        learnt[at] = dict(np.load(tmp_path / f"{at}.npz"))
    for key, expected in learnt[0].items():
        np.testing.assert_array_equal(learnt[17][key], expected, err_msg=key)


@pytest.mark.long
def test_sigterm_ends_a_script_that_then_writes_its_cached_rows(tmp_path):
    with Servers(2) as servers, Processes(tmp_path) as processes:
        given = train_and_wait, servers.addresses, tmp_path
        trainer = processes.start("trainer", *given, is_spawned=True)
        trainer.has_printed("trained")
        trainer.send(signal.SIGTERM)
        assert trainer.status() == 128 + signal.SIGTERM, trainer.output()
        with closing(EmbeddingClient.connect(servers.addresses)) as client:
            client.learn_tables()
            for table, ids in touched(make_batches(3)).items():
                rows = client.read(table, ids.astype("u8"), initial=False)
                expected = np.load(tmp_path / f"{table}.npy")
                np.testing.assert_array_equal(rows, expected)


def test_a_successor_may_fill_tables_first_and_an_evaluation_owns_none():
    batches = make_batches(4)
    with alone(), Servers(2) as servers, ExitStack() as stack:
        first, second, third = (
            stack.enter_context(closing(EmbeddingClient.connect(servers.addresses)))
            for _ in range(3)
        )
        twins = Twins(SimpleNamespace(client=first, shard=lambda m, s: shard(m, *s)))
        twins.losses(twins.remote, batches)
        twins.sharders.flush()
        sharders = remote_sharders(third, ROWWISE, cache=Cache(rows=600))
        reading = shard(make_model(), *sharders).eval()
        with torch.no_grad():
            reading(batches[0])
        twins.losses(twins.remote, batches)  # it is still the owner
        state = reading.state_dict()
        sharders = remote_sharders(second, ROWWISE, cache=Cache(rows=600))
        model = shard(make_model(), *sharders)
        model.load_state_dict(state)  # the first one has died
        twins.losses(model, batches)
        with pytest.raises(RemoteError, match="another one of its rank has owned"):
            twins.sharders.flush()


def test_a_trainer_that_continues_beside_its_successor_writes_nothing():
    batches = make_batches(6)
    ids = touched(batches)["user"].astype(np.uint64)
    with alone(), Servers(2) as servers, ExitStack() as stack:
        first, second = (
            stack.enter_context(closing(EmbeddingClient.connect(servers.addresses)))
            for _ in range(2)
        )
        twins = Twins(SimpleNamespace(client=first, shard=lambda m, s: shard(m, *s)))
        twins.losses(twins.remote, batches)  # and is stopped, with rows to write
        sharders = remote_sharders(second, ROWWISE, cache=Cache(rows=600))
        model = shard(make_model(), *sharders)
        twins.losses(model, batches)
        sharders.flush()
        rows = second.read("user", ids)
        with pytest.raises(RemoteError, match="another one of its rank has owned"):
            twins.sharders.flush()
        assert np.array_equal(second.read("user", ids), rows)
        sharders.close()
        third = stack.enter_context(closing(EmbeddingClient.connect(servers.addresses)))
        third.learn_tables()
        third.clear()  # none owns them any more
