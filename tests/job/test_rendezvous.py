"""The rounds in which torchrun's agents meet, by notes of the address book."""

import base64
import contextlib
import pickle
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.utils.store import barrier

from persia_torchrec.errors import FrameError
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.rendezvous import BookRendezvous, RoundNotes, host_store
from tests.support.processes import DEADLINE_S, wait_until
from tests.support.sockets import listening
from tests.support.strangers import AS_ANOTHER_USER, be_stranger

HERE = "127.0.0.1"


@pytest.fixture
def book():
    with contextlib.closing(AddressBook.host(0)) as book:
        yield book


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as threads:
        yield threads


def agents_of(book, num=2):
    return [BookRendezvous(book, rank, num, HERE) for rank in range(num)]


def meet(threads, agents):
    """Have agents begin a round; return what each has learned."""
    infos = [threads.submit(agent.next_rendezvous) for agent in agents]
    return [info.result(DEADLINE_S) for info in infos]


def ranks_of(infos):
    return [(info.rank, info.world_size) for info in infos]


def place_of(info):
    where = info.bootstrap_store_info
    return where.master_addr, where.master_port


def waits(agent):
    agent.look()
    return agent.num_nodes_waiting()


def test_agents_have_the_ranks_of_their_machines_and_one_store(book, threads):
    agents = agents_of(book)  # the first one hosts the store
    infos = meet(threads, agents)
    assert ranks_of(infos) == [(0, 2), (1, 2)]
    assert place_of(infos[0]) == place_of(infos[1])
    assert place_of(infos[0])[0] == HERE
    infos[1].store.set("key", b"text")
    infos[0].store.multi_set(["a", "b"], ["1", "2"])
    assert infos[0].store.get("key") == b"text"
    assert infos[1].store.multi_get(["a", "b"]) == [b"1", b"2"]
    workers = [TCPStore(*place_of(info), is_master=False) for info in infos]
    workers[0].set("key", "of NN workers")
    assert workers[1].get("key") == b"of NN workers"


def test_a_single_agent_needs_no_other(book, threads):
    agents = agents_of(book, 1)
    first = meet(threads, agents)[0]
    second = meet(threads, agents)[0]
    assert ranks_of([first, second]) == [(0, 1), (0, 1)]
    assert place_of(first) != place_of(second)
    assert not waits(agents[0])


@pytest.mark.parametrize("rank", [0, 1])
def test_an_agent_that_is_started_again_begins_a_round_with_the_others(
    book, threads, rank
):
    agents = agents_of(book)
    before = place_of(meet(threads, agents)[0])
    assert not any(map(waits, agents))
    agents[rank] = agents_of(book)[rank]
    again = threads.submit(agents[rank].next_rendezvous)
    other = agents[1 - rank]
    wait_until(lambda: waits(other), "the other agent learns of it")
    assert not again.done()
    infos = [other.next_rendezvous(), again.result(DEADLINE_S)]
    infos = infos if rank else infos[::-1]
    assert ranks_of(infos) == [(0, 2), (1, 2)]
    assert place_of(infos[0]) == place_of(infos[1]) != before
    assert not any(map(waits, agents))


def test_agents_whose_nn_workers_fail_at_once_meet_in_one_round(book, threads):
    agents = agents_of(book)
    for _ in range(5):
        meet(threads, agents)
        assert not any(map(waits, agents))


def test_an_agent_that_ends_while_others_wait_for_it_is_waited_for(book, threads):
    agents = agents_of(book, 3)
    waiting = threads.submit(agents[0].next_rendezvous)
    wait_until(lambda: book.note("nn-worker/round/0"), "agent 0 is ready")
    book.tell("nn-worker/round/1", "1")  # agent 1 was ready, and was killed
    infos = meet(threads, agents[1:])
    assert ranks_of([waiting.result(DEADLINE_S), *infos]) == [(0, 3), (1, 3), (2, 3)]
    assert not any(map(waits, agents))


def test_notes_of_an_earlier_round_are_none(book):
    first, second = RoundNotes(book, 1), RoundNotes(book, 2)
    book.tell("nn-worker/round", "1")
    assert [first.add("count", 1), first.add("count", 2)] == [1, 3]
    first.set("key", "of the first")
    assert second.add("count", 1) == 1
    second.set_timeout(timedelta(0))
    with pytest.raises(RendezvousTimeoutError, match=r"within 0 s. Missing: key"):
        second.get("key")
    book.tell("nn-worker/round", "2")
    second.set("key", "of the second")
    with pytest.raises(RendezvousStateError, match="1 of the NN workers must be the"):
        first.get("key")


def test_agents_end_with_the_job_and_wait_for_no_other(book):
    notes = RoundNotes(book, 1)
    book.finish()
    barrier(notes, 2, "the end", DEADLINE_S)
    book.close()
    barrier(notes, 2, "the end", DEADLINE_S)
    with pytest.raises(RendezvousConnectionError, match="address book must be open"):
        notes.get("key")


def test_a_torchrun_that_is_late_is_named(book, monkeypatch):
    monkeypatch.setenv("PERSIA_JOIN_TIMEOUT_S", "0.1")
    must = r"All 2 torchruns must be ready within 0.1 s. Received: none from torchrun 1"
    with pytest.raises(RendezvousTimeoutError, match=must):
        agents_of(book)[0].next_rendezvous()


class Code:
    """What runs when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def leave_code(address, port, prefix, path):
    """Put a pickle where torch's rendezvous looks for one."""
    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
    code = base64.b64encode(pickle.dumps(Code(path)))
    for key in (prefix, "nn-worker/round", "nn-worker/round/0", "store"):
        store.set(key, code)
        PrefixStore(prefix, store).set(key, code)
    print("left")


@AS_ANOTHER_USER
@pytest.mark.multiprocess
def test_what_a_stranger_leaves_for_the_agents_is_not_run(
    book, threads, processes, tmp_path
):
    agents, path = agents_of(book), tmp_path / "code ran"
    info, _ = meet(threads, agents)
    where = *place_of(info), f"torch.rendezvous.{book.greeting.job_id}"
    stranger = processes.start("stranger", be_stranger, leave_code, *where, path)
    assert stranger.status() == 0, stranger.output()
    assert stranger.output().endswith("left\n")
    assert not any(map(waits, agents))
    assert ranks_of(meet(threads, agents)) == [(0, 2), (1, 2)]
    assert not path.exists()


def test_a_pickle_in_the_address_book_is_no_note(book, threads, tmp_path):
    code = base64.b64encode(pickle.dumps(Code(tmp_path / "code ran"))).decode()
    (agent,) = agents_of(book, 1)
    meet(threads, [agent])
    for note in ("nn-worker/round", "nn-worker/round/0", "nn-worker/round/key"):
        book.tell(note, code)
    for act in (agent.look, agent.next_rendezvous):
        with pytest.raises(FrameError, match="note of a round must be"):
            act()
    assert list(tmp_path.iterdir()) == []


def test_the_store_of_nn_workers_listens_on_one_address():
    store = host_store(HERE)
    assert listening(["self"])[store.port] == HERE
