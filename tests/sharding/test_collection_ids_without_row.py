"""Ids without a row read one thing: in evaluation, state dicts, reads and serving."""

import json

import numpy as np
import pytest
import torch

from persia_torchrec import (
    SGD,
    Adagrad,
    AdmitFrequency,
    EmbeddingClient,
    TableSettings,
    load_checkpoint,
    plain_state_dict,
    remote_sharders,
    save_checkpoint,
)
from persia_torchrec.embedding.initializer import Normal, Uniform
from persia_torchrec.embedding.usage import DynamicDim
from persia_torchrec.store.embedding_store import EmbeddingStore
from persia_torchrec.store.row_copy import initial_rows
from persia_torchrec.table import TableSpec
from tests.support.models import tables_of
from tests.support.remote_job import CPU, META, Bags, Servers, ids_of, kjt_of

DIM = 4
ALL = kjt_of({"f": [[id_] for id_ in range(8)]})


def bags(name, device=META):
    return Bags(tables_of([name], 8, DIM, feature="f"), device)


def key_of(name):
    return f"bags.embedding_bags.{name}.weight"


@pytest.mark.parametrize("optimizer", [SGD(1.0), Adagrad(1.0)])
def test_evaluation_reads_what_the_state_dict_has(shared_job, optimizer):
    name = f"initial {optimizer.kind}"
    model = shared_job.shard(bags(name), remote_sharders(shared_job.client, optimizer))
    state = model.state_dict()[key_of(name)].whole()
    assert state.abs().min() > 0
    model.eval()
    assert torch.equal(model(ALL).values(), state)
    with torch.no_grad():
        assert torch.equal(model.train()(ALL).values(), state)
    assert not len(shared_job.client.count_ids(name)[1])
    model.eval()
    before = model(ALL).values()
    model.load_state_dict({key_of(name): state.clone()})
    assert torch.equal(model(ALL).values(), before)
    plain = bags(name, CPU)
    plain.load_state_dict(plain_state_dict(shared_job.client, bags(name)))
    assert torch.equal(plain(ALL).values(), before)
    trained = model.train()(ALL).values()
    assert torch.equal(trained.detach(), before)


def test_a_table_may_read_zeros_everywhere(shared_job):
    settings = {"zeros": TableSettings(ids_without_row="zeros")}
    given = remote_sharders(shared_job.client, SGD(1.0), tables=settings)
    model = shared_job.shard(bags("zeros"), given)
    assert not model.eval()(ALL).values().any()
    assert not model.state_dict()[key_of("zeros")].whole().any()
    assert not plain_state_dict(shared_job.client, bags("zeros"))[key_of("zeros")].any()
    assert not shared_job.client.read("zeros", ids_of([3])).any()
    model.train()(kjt_of({"f": [[3]]}))
    shared_job.client.wait_for_lookups()
    assert model.eval()(ALL).values().any(dim=1).tolist() == [i == 3 for i in range(8)]


def test_client_reads_follow_the_table_unless_told(shared_job):
    shared_job.shard(bags("read"), remote_sharders(shared_job.client, Adagrad(1.0)))
    read = shared_job.client.read("read", ids_of([5]))
    assert read.any()
    assert (read[:, DIM:] == np.float32(1e-2)).all()  # the accumulators begin so
    assert not shared_job.client.read("read", ids_of([5]), initial=False).any()


def test_an_admission_keeps_zeros_for_ids_that_wait(shared_job):
    settings = {"waits": TableSettings(admission=AdmitFrequency(3))}
    given = remote_sharders(shared_job.client, SGD(1.0), tables=settings)
    model = shared_job.shard(bags("waits"), given)
    assert shared_job.client.table("waits").ids_without_row == "zeros"
    assert not model(ALL).values().any()
    assert not model.eval()(ALL).values().any()


def test_checkpoints_keep_it_and_servers_of_inference_follow(shared_job, tmp_path):
    sharders = remote_sharders(shared_job.client, SGD(1.0))
    model = shared_job.shard(bags("kept"), sharders)
    expected = model.eval()(ALL).values().detach()
    save_checkpoint(tmp_path / "c", {}, shared_job.client, sharders)
    with Servers(3) as servers:
        client = EmbeddingClient.connect(servers.addresses)
        client.checkpoints.load(str(next((tmp_path / "c").glob("checkpoint-*"))))
        client.learn_tables()
        assert client.table("kept").ids_without_row == "initial"
        split = client.split(ids_of(range(8)))
        [rows] = client.pull([("kept", split)])
        assert np.array_equal(rows[split.inverse], expected.numpy())
        client.close()
    load_checkpoint(tmp_path / "c", {}, shared_job.client)
    assert torch.equal(model(ALL).values(), expected)


def test_a_table_of_an_earlier_version_reads_zeros():
    spec = TableSpec(name="t", dim=4, optimizer=SGD(1.0))
    assert "ids_without_row" not in json.dumps(spec.to_json())
    assert TableSpec.from_json(spec.to_json()).ids_without_row == "zeros"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("initializer", [Uniform(), Normal(0.0, 1.0)])
@pytest.mark.parametrize("dynamic", [DynamicDim(), DynamicDim(blocks=2)])
def test_a_store_reads_what_rows_would_begin_with(dtype, initializer, dynamic):
    store = EmbeddingStore(100, optimizer_engine="compiled")
    spec = TableSpec(
        name="t",
        dim=8,
        optimizer=Adagrad(1.0),
        initializer=initializer,
        seed=7,
        weight_dtype=dtype,
        dynamic=dynamic,
        ids_without_row="initial",
    )
    store.add_tables([spec])
    ids = ids_of([3, 2**63, 3, 9])
    read = np.empty((4, 8), dtype=np.float32)
    store.lookup(0, ids, read, training=False)
    assert np.array_equal(read, initial_rows(spec, ids)[:, :8])
    assert int(store.rows.tally[1]) == 4 * (1 + (dynamic.blocks > 1))  # misses
    made = np.empty_like(read)
    store.lookup(0, ids, made, training=True)
    assert np.array_equal(read, made)
    store.lookup(0, ids, read, training=False)
    assert np.array_equal(read, made)
