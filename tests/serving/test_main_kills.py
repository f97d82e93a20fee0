"""Each part of a serving job is killed under load; every request is counted."""

import signal

import pytest

from tests.support.inference_job import (
    InferenceJob,
    address_of,
    comes_back,
    kill_below,
)
from tests.support.load import NO_ANSWER, Load
from tests.support.ports import draw_port
from tests.support.processes import (
    DEADLINE_S,
    children_of,
    is_running,
    wait_until,
)
from tests.support.served_model import EVALUATION
from tests.support.serving_process import Serving

RATE, NUM_THREADS, ENOUGH = 300, 60, 300

pytestmark = [pytest.mark.multiprocess, pytest.mark.long]


def load(serving, trained):
    body, expected = EVALUATION[0].to_bytes(), trained.expected[0]
    return Load(serving.address, body, expected, rate=RATE, num_threads=NUM_THREADS)


def answers(sent):
    """Wait until many more requests are answered."""
    seen = sent.statuses[200]
    wait_until(lambda: sent.statuses[200] >= seen + ENOUGH, "it predicts")


def test_a_killed_server_or_worker_costs_no_request_while_they_are_waited_for(
    processes, trained
):
    job = InferenceJob(processes, trained.checkpoint, trained.embedding_config)
    server = job.supervised_server()
    workers = [job.supervised_worker(index) for index in range(2)]
    serving = Serving(
        processes,
        *("--checkpoint", str(trained.checkpoint), "--patience-s", str(DEADLINE_S)),
        *("--workers", *map(address_of, workers)),
    )
    with load(serving, trained) as sent:
        for killed in (*workers, server):
            answers(sent)
            kill_below(killed)
            comes_back(killed)
        answers(sent)
    assert sent.statuses == {200: sent.sent}
    assert sent.wrong == 0


def test_a_killed_predictor_answers_again_when_it_is_started_again(processes, trained):
    words = (
        *("--checkpoint", str(trained.checkpoint), "--port", str(draw_port())),
        *("--embedding-config", str(trained.embedding_config)),
    )
    serving = Serving(processes, *words)
    (server,) = children_of(serving.process.pid)
    with load(serving, trained) as sent:
        answers(sent)
        serving.process.send(signal.SIGKILL)
        wait_until(lambda: sent.statuses[NO_ANSWER], "requests have no answer")
        wait_until(lambda: not is_running(server), "its embedding server ends with it")
        again = Serving(processes, *words, name="again")
        assert again.address == serving.address
        answers(sent)
    assert sent.statuses.total() == sent.sent
    assert set(sent.statuses) == {200, NO_ANSWER}
    assert sent.wrong == 0
