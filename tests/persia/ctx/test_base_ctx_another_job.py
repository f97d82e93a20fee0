"""Servers, workers and trainers that belong to another job than who asks them."""

import contextlib

import pytest

from persia_torchrec.ctx import EmbeddingCtx, PreprocessMode
from persia_torchrec.errors import TokenError
from persia_torchrec.persia.engine import connect_to_job
from persia_torchrec.persia.stream import Inbox
from persia_torchrec.rpc.greeting import Greeting
from tests.support.local_job import LocalJob, batch_of

THEIRS = Greeting("theirs")


@pytest.fixture
def job(tmp_path, monkeypatch):
    with LocalJob(tmp_path, monkeypatch, greeting=THEIRS) as job:
        yield job


@pytest.fixture
def rejected(job):
    message = (
        r"must be that of embedding (server|worker) 0 of job "
        f"'{job.book.greeting.job_id}'. Received: another process"
    )
    return pytest.raises(TokenError, match=message)


def test_a_trainer_is_rejected_by_servers_and_by_workers(job, rejected):
    with rejected, job.train_ctx():
        pass
    with rejected:
        connect_to_job()[1].hello()


def test_an_evaluation_outside_of_the_job_is_rejected(job, rejected):
    with rejected, EmbeddingCtx(PreprocessMode.EVAL):
        pass


@contextlib.contextmanager
def loader(job, receiver_of):
    """A data loader, and a trainer of some job that it sends to."""
    receiving = Inbox(1, 0, 1).listen("127.0.0.1", receiver_of)
    with contextlib.closing(receiving) as receiver:
        job.book.register("trainer", 0, 1, receiver.address)
        with job.data_ctx() as ctx:
            yield ctx


def test_a_data_loader_is_rejected_by_workers(job, rejected):
    with rejected, loader(job, Greeting()) as ctx:
        ctx.send_data(batch_of([1]))


def test_a_data_loader_is_rejected_by_trainers(tmp_path, monkeypatch):
    with (
        LocalJob(tmp_path, monkeypatch) as job,
        pytest.raises(TokenError, match=r"must be that of trainer 0 of job"),
        loader(job, THEIRS) as ctx,
    ):
        ctx.send_data(batch_of([1]))
