"""Each row of each epoch is trained once, whichever trainers are killed when."""

from contextlib import closing

import numpy as np
import pytest

from persia_torchrec import EmbeddingClient
from tests.support import queued_trainers
from tests.support.groups import run, run_group_to_a_kill
from tests.support.processes import Processes
from tests.support.queued_trainers import NUM_EPOCHS, write_files
from tests.support.remote_job import Servers

pytestmark = pytest.mark.multiprocess


def test_other_numbers_of_trainers_train_each_row_once(tmp_path):
    num_rows = write_files(tmp_path, [30, 1, 40, 9])
    with Servers(2) as servers, Processes(tmp_path) as processes:
        for life, (size, dies_at) in enumerate([(2, 5), (3, 0)]):
            given = (lambda rank: rank), size, servers.addresses, tmp_path, dies_at
            act = run_group_to_a_kill if dies_at else run
            names = processes, "queued", queued_trainers.train
            outputs = act(*names, *given, life=life, size=size)
        with closing(EmbeddingClient.connect(servers.addresses)) as client:
            client.learn_tables()
            counts = client.read("id", np.arange(num_rows, dtype=np.uint64))
    assert "checkpoint-" in outputs[0]
    assert counts.tolist() == [[NUM_EPOCHS] * 4] * num_rows
