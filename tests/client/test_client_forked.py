"""A client, and what stands on it, in another process than its own."""

import copy
import os
import pickle

import numpy as np
import pytest
from torchrec import EmbeddingBagConfig

from persia_torchrec import SGD, remote_sharders
from persia_torchrec.errors import ConfigError
from tests.support.remote_job import Bags, RemoteJob, kjt_of


@pytest.fixture(scope="module")
def trained():
    table = EmbeddingBagConfig(10, 4, name="t", feature_names=["f"])
    with RemoteJob() as job:
        sharders = remote_sharders(job.client, SGD(1.0), staleness=1)
        model = job.shard(Bags([table]), sharders)
        model(kjt_of({"f": [[1]]})).values().sum().backward()
        sharders.flush()
        yield job.client, model, sharders


def look_up(_, model, __):
    model.eval()
    model(kjt_of({"f": [[1]]})).values()


IN_A_CHILD = {
    "read": lambda client, _, __: client.read("t", np.ones(1, np.uint64)),
    "evaluate": look_up,
    "train": lambda _, model, __: model(kjt_of({"f": [[1]]})).values(),
    "state_dict": lambda _, model, __: model.state_dict(),
    "flush": lambda _, __, sharders: sharders.flush(),
    "dump": lambda client, _, __: client.checkpoints.dump("/nowhere"),
    "num_rows": lambda client, _, __: client.num_rows(),
}


@pytest.mark.parametrize("name", IN_A_CHILD)
def test_a_call_in_a_forked_child_names_both_processes(trained, name):
    out, into = os.pipe()
    if (child := os.fork()) == 0:
        try:
            IN_A_CHILD[name](*trained)
            text = "it returned"
        except BaseException as exc:  # noqa: BLE001  # told to the parent
            text = f"{type(exc).__name__} {exc}"
        os.write(into, text.encode())
        os._exit(0)
    os.close(into)
    with os.fdopen(out) as told:
        text = told.read()
    os.waitpid(child, 0)
    assert text.startswith("ConfigError Threads and connections"), text
    assert f"process {os.getpid()}," in text
    assert f"process {child}, a fork" in text


def test_the_parent_continues(trained):
    _, model, sharders = trained
    model.train()
    model(kjt_of({"f": [[1]]})).values().sum().backward()
    sharders.flush()


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy])
def test_to_pickle_or_copy_a_client_reports_what_to_do(trained, copied):
    client, model, sharders = trained
    for what in (client, sharders, sharders[0], model.fused_optimizer):
        with pytest.raises(ConfigError, match=r"cannot be pickled or copied\."):
            copied(what)
    with pytest.raises(ConfigError, match=r"cannot be (copied|pickled)"):
        copied(model)
