"""PERSIA's checkpoints are converted to the bit; damaged ones are rejected."""

import contextlib
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from persia_torchrec.checkpoint.catalog import Manifest, find_checkpoint
from persia_torchrec.client.client import BatchNumber
from persia_torchrec.data import DataLoader
from persia_torchrec.embedding.embedding_config import load_embedding_config
from persia_torchrec.embedding.optim import SGD, Adagrad, Adam
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.errors import CheckpointError, ConfigError, RemoteError
from persia_torchrec.lookup.bags import Bags
from persia_torchrec.persia.convert import Conversion, convert_checkpoint, main
from persia_torchrec.persia.slots import SlotsLookup, build_features, build_tables
from tests.support import reference
from tests.support.local_job import Batches, LocalJob, SumOfEmbeddings, batch_of
from tests.support.persia_files import Row, file_bytes, prefixed, write_checkpoint
from tests.support.processes import wait_until
from tests.support.servers import Servers, ids_of

pytestmark = pytest.mark.slow

CONFIG = """
feature_index_prefix_bit: {bits}
slots_config:
  user: {{dim: 3}}
  item: {{dim: 2}}
  basket: {{dim: 2}}
  stacked: {{dim: 1, hash_stack_config: {{hash_stack_rounds: 2, embedding_size: 7}}}}
feature_groups:
  things: [item, basket]
"""
# In the order of the prefixes, with a slot of each.
GROUPS = {"things": ("basket", 2), "user": ("user", 3), "stacked": ("stacked", 1)}
OPTIMIZERS = {
    "sgd": (SGD(0.5), lambda dim: 0),
    "adagrad": (Adagrad(0.1), lambda dim: dim),
    "adagrad_vectorwise_shared": (
        Adagrad(0.1, vectorwise_shared=True),
        lambda dim: 1,
    ),
    "adam": (Adam(0.1), lambda dim: 2 * dim),
}
NAMES = list(OPTIMIZERS)
EDGES = [0, 1, 2**52 - 1, 2**63, 2**64 - 2, 2**64 - 1]


def config_file(folder, bits=8):
    path = folder / "config.yml"
    path.write_text(CONFIG.format(bits=bits))
    return str(path)


def rows_of(group, ids, bits, num_state, rng):
    """Return rows of random floats for ids without prefix, each id once."""
    number, dim = list(GROUPS).index(group) + 1, GROUPS[group][1]
    numbers = dict.fromkeys(prefixed(id_, number, bits) for id_ in ids)
    return [
        Row(id_, rng.uniform(0.1, 1, dim + num_state(dim)).astype(np.float32), dim)
        for id_ in numbers
    ]


def make_rows(rng, optimizer, bits, num_ids):
    """Return raw ids by group, their rows by group, and all rows in a random order."""
    num_state = OPTIMIZERS[optimizer][1]
    ids, rows = {}, {}
    for group, (slot, _) in GROUPS.items():
        drawn = rng.integers(0, 2**64, num_ids, dtype=np.uint64).tolist()
        ids[group] = [*EDGES, *drawn] if num_ids else []
        stored = ids[group]
        if slot == "stacked":
            stored = [b for id_ in stored for b in reference.hash_stack(id_, 2, 7)]
        rows[group] = rows_of(group, stored, bits, num_state, rng)
    together = [row for of_group in rows.values() for row in of_group]
    return ids, rows, [together[n] for n in rng.permutation(len(together))]


def start_servers(servers, schema, optimizer, num_servers, capacity_rows=1000):
    client = servers.client(servers.start(num_servers, capacity_rows=capacity_rows))
    lookup = SlotsLookup(client, build_features(schema))
    lookup.add_tables(build_tables(schema, EmbeddingConfig(), optimizer))
    return client, lookup


def assert_rows(client, rows):
    for group, of_group in rows.items():
        ids = ids_of(*(row.id for row in of_group))
        expected = [row.floats.tobytes() for row in of_group]
        assert [floats.tobytes() for floats in client.read(group, ids)] == expected


def assert_lookups(lookup, ids, rows, bits):
    """Look up the raw ids as a batch of samples with one id each."""
    num_samples = len(ids["user"])
    ones = np.ones(num_samples, dtype=np.int32)
    bags = {slot: Bags(ids_of(*ids[g]), ones) for g, (slot, _) in GROUPS.items()}
    outputs, _ = lookup.pull(bags, None)
    weights = {row.id: row.floats[: row.dim] for r in rows.values() for row in r}
    expected = []
    for number, group in enumerate(GROUPS, 1):
        if GROUPS[group][0] == "stacked":
            stored = [reference.hash_stack(id_, 2, 7) for id_ in ids[group]]
        else:
            stored = [[id_] for id_ in ids[group]]
        sums = [
            sum(weights[prefixed(id_, number, bits)] for id_ in of_id)
            for of_id in stored
        ]
        expected.append(np.array(sums))
    assert np.array_equal(outputs[0], np.concatenate(expected, axis=1))


def assert_next_step(client, rows, optimizer, step):
    """Train all rows once, and compare with the formula."""
    for group, of_group in rows.items():
        ids, dim = [row.id for row in of_group], GROUPS[group][1]
        split = client.split(ids_of(*ids))
        number = BatchNumber(1, 1 + list(GROUPS).index(group))
        client.pull([(group, split)], batch=number)
        grads = np.sin(np.arange(len(ids) * dim, dtype=np.float32)).reshape(-1, dim)
        client.outcome(client.push([(group, split)], [grads], number))
        given = {int(id_): grad for id_, grad in zip(split.ids, grads, strict=True)}
        expected = []
        for row in of_group:
            floats = row.floats.astype(np.float64)
            doubles = reference.Row(floats[:dim], floats[dim:])
            reference.step(optimizer, doubles, given[row.id].astype(np.float64), step)
            expected.append(doubles.floats())
        found = client.read(group, ids_of(*ids))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@settings(max_examples=10)
@given(
    optimizer=st.sampled_from(NAMES),
    bits=st.sampled_from([2, 8, 12, 40]),
    before=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    after=st.integers(1, 3),
    num_ids=st.integers(0, 30),
    num_free=st.integers(1, 40),
    seed=st.integers(0, 2**32),
)
def test_lookups_and_the_next_step_equal_those_of_persias_rows(
    optimizer, bits, before, after, num_ids, num_free, seed
):
    rng = np.random.default_rng(seed)
    ids, rows, together = make_rows(rng, optimizer, bits, num_ids)
    num_servers, num_shards = before
    with tempfile.TemporaryDirectory() as folder, Servers() as servers:
        path = Path(folder)
        write_checkpoint(
            path,
            together,
            rng,
            num_servers=num_servers,
            num_shards=num_shards,
            num_free=num_free,
        )
        config = config_file(path, bits)
        convert_checkpoint(
            Conversion(
                source=folder,
                destination=f"{folder}/run",
                embedding_config=config,
                optimizer="auto" if num_ids else optimizer,
                adam_step=40,
            )
        )
        ours = OPTIMIZERS[optimizer][0]
        client, lookup = start_servers(
            servers, load_embedding_config(config), ours, after
        )
        loaded = client.checkpoints.load(f"{folder}/run")
        assert (loaded.num_rows, loaded.num_left_out) == (len(together), 0)
        assert_rows(client, rows)
        if num_ids:
            assert_lookups(lookup, ids, rows, bits)
            assert_next_step(client, rows, ours, 41)


@pytest.fixture
def dumped(tmp_path):
    """Return a checkpoint of PERSIA's: its folder, config, rows and files of rows."""
    rng = np.random.default_rng(1)
    _, _, rows = make_rows(rng, "adagrad", 8, 10)
    folder = tmp_path / "persia"
    files = write_checkpoint(folder, rows, rng, num_servers=2, num_shards=2)
    return folder, config_file(tmp_path), rows, files


def conversion(folder, config, **more):
    return Conversion(
        source=str(folder),
        destination=str(folder.parent / "run"),
        embedding_config=config,
        **more,
    )


@pytest.mark.parametrize("num_servers", [1, 3])
def test_the_rows_used_last_are_kept_by_small_servers(tmp_path, servers, num_servers):
    rng = np.random.default_rng(0)
    _, _, rows = make_rows(rng, "sgd", 8, 100)
    write_checkpoint(tmp_path / "persia", rows, rng, num_shards=2)
    config = config_file(tmp_path)
    saved = convert_checkpoint(conversion(tmp_path / "persia", config))
    schema = load_embedding_config(config)
    client, _ = start_servers(servers, schema, SGD(0.5), num_servers, 60)
    client.checkpoints.load(saved.url)
    number = {group: n for n, group in enumerate(GROUPS, 1)}
    is_kept = [
        any(
            client.read(group, ids_of(row.id)).any()
            for group in GROUPS
            if row.id >> 56 == number[group]
        )
        for row in rows
    ]
    assert sum(is_kept) == min(60 * num_servers, len(rows))
    # Two lists are merged by age, and a server gets a share by a hash.
    left, kept = np.flatnonzero(~np.array(is_kept)), np.flatnonzero(is_kept)
    assert kept.mean() > left.mean() + 100


def test_one_list_keeps_its_order(tmp_path, servers):
    rng = np.random.default_rng(0)
    _, _, rows = make_rows(rng, "sgd", 8, 100)
    write_checkpoint(tmp_path / "persia", rows, rng)
    config = config_file(tmp_path)
    saved = convert_checkpoint(conversion(tmp_path / "persia", config))
    client, _ = start_servers(servers, load_embedding_config(config), SGD(0.5), 1, 60)
    client.checkpoints.load(saved.url)
    groups = list(GROUPS)
    is_kept = [
        client.read(groups[(row.id >> 56) - 1], ids_of(row.id)).any() for row in rows
    ]
    assert is_kept == [n >= len(rows) - 60 for n in range(len(rows))]


def rejected(folder, config, match, **more):
    """Convert what cannot be converted; there is no checkpoint then."""
    with pytest.raises((CheckpointError, ConfigError), match=match) as caught:
        convert_checkpoint(conversion(folder, config, **more))
    with pytest.raises(CheckpointError, match="must be a checkpoint"):
        find_checkpoint(folder.parent / "run")
    assert list(folder.parent.glob("run/*")) == []
    return caught


@settings(max_examples=20)
@given(data=st.data())
def test_a_file_that_is_cut_off_is_rejected_with_the_byte(data):
    rng = np.random.default_rng(2)
    _, _, rows = make_rows(rng, "adam", 8, 4)
    whole = file_bytes(rows, len(rows) + 5, rng)
    place = data.draw(st.integers(0, len(whole) - 1))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "persia"
        (path,) = write_checkpoint(folder, [], rng)
        path.write_bytes(whole[:place])
        caught = rejected(
            folder, config_file(folder), rf"{path}.* byte \d+", optimizer="adam"
        )
    assert caught.type is CheckpointError


def place_of_row(data):
    """Return where the first used slot of a file begins."""
    at = 28
    while data[at + 8] == 0:
        at += 9
    return at


def changed(offset, layout, value, *, in_row=True):
    """Return what writes a number, from the beginning of the first row or the file."""

    def change(data):
        at = (place_of_row(data) if in_row else 0) + offset
        struct.pack_into(layout, data, at, value)
        return data

    return change


def change_tail(number, value):
    """Return what changes the dim (0) or the id (1) of the first row."""

    def change(data):
        at = place_of_row(data)
        (num_floats,) = struct.unpack_from("<I", data, at + 9)
        struct.pack_into("<Q", data, at + 13 + 4 * num_floats + 8 * number, value)
        return data

    return change


def fewer_slots(data):
    (num_slots,) = struct.unpack_from("<I", data, 24)
    struct.pack_into("<I", data, 24, num_slots - 1)
    return data


def loop(data):
    """Let the first slot of the list lead to itself."""
    (first,) = struct.unpack_from("<I", data, 8)
    at = 28
    for _ in range(first - 1):
        (num_floats,) = struct.unpack_from("<I", data, at + 9)
        at += 29 + 4 * num_floats if data[at + 8] else 9
    struct.pack_into("<I", data, at, first)
    return data


@pytest.mark.parametrize(
    ("change", "received"),
    [
        (changed(8, "<B", 2), r"byte \d+: a slot that begins with [0-9a-f]*02, "),
        (changed(9, "<I", 2**31), r"byte \d+: a row of 2147483648 floats"),
        (changed(9, "<I", 1), r"byte \d+: .*prefix"),
        (changed(0, "<I", 0), r"byte 0: a head that says"),
        (changed(0, "<Q", 3, in_row=False), r"byte 0: a head that says 3 rows"),
        (changed(0, "<Q", 2**40, in_row=False), r"byte 0: .* 1099511627776 rows in"),
        (changed(24, "<I", 2**31, in_row=False), r"byte 0: .* in 2147483648 slots"),
        (fewer_slots, r"byte \d+: more bytes after the last"),
        (changed(8, "<I", 0, in_row=False), r"links that lead from slot 0 to 0 of"),
        (loop, r"links that lead from slot \d+ to 1 of them"),
        (change_tail(0, 5), r"byte \d+: .* of dim 5; '\w+' has \d \(adagrad\) of dim"),
        (change_tail(1, 5), r"byte \d+: id 5 with prefix 0, .* config are 1 to 3"),
        (change_tail(1, 4 << 56), r"byte \d+: .* prefix 4, .* config are 1 to 3"),
        (lambda data: data + b"\0", r"byte \d+: more bytes after the last slot"),
        (lambda data: data[:0], r"is cut off: more must follow byte 0"),
    ],
)
def test_damage_is_rejected_with_the_byte(dumped, change, received):
    folder, config, _, files = dumped
    files[1].write_bytes(change(bytearray(files[1].read_bytes())))
    rejected(folder, config, rf"{files[1]} .*{received}", optimizer="adagrad")


def test_an_id_of_another_server_is_rejected(dumped):
    folder, config, _, files = dumped
    files[1].write_bytes(files[2].read_bytes())
    rejected(folder, config, rf"{files[1]} .* byte \d+: id \d+, which is of another")


def test_an_id_that_comes_twice_is_rejected_with_both_offsets(dumped):
    folder, config, rows, _ = dumped
    both = [*rows, rows[7]]
    other = folder.parent / "twice"
    write_checkpoint(other, both, np.random.default_rng(3), num_shards=2)
    caught = rejected(other, config, rf"id {rows[7].id} at .*\.emb byte \d+ and at ")
    assert caught.type is CheckpointError


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda f: (f / "embedding_dump_done").unlink(),
            "persia/embedding_dump_done must exist",
        ),
        (
            lambda f: (f / "s1/embedding_dump_done").unlink(),
            "s1/embedding_dump_done must exist",
        ),
        (
            lambda f: (f / "embedding_dump_done").write_text("num_shards: 2"),
            "num_internal_shards",
        ),
        (lambda f: (f / "embedding_dump_done").write_text("{"), "must be YAML"),
        (
            lambda f: (f / "s1/replica_1_shard_1.emb").unlink(),
            r"without \['replica_1_shard_1.emb'\]",
        ),
        (lambda f: (f / "s1/x.emb").touch(), r"with \['x.emb'\]"),
        (lambda f: (f / "s2").mkdir(), r"the folders s0 to s1.*'s2'"),
        (lambda f: (f / "dense.pt").write_bytes(b"?"), "dense.pt must be a state_dict"),
    ],
)
def test_an_incomplete_folder_is_rejected(dumped, spoil, message):
    folder, config, _, _ = dumped
    spoil(folder)
    rejected(folder, config, message)


def test_another_optimizer_is_rejected_with_the_sizes(dumped):
    folder, config, _, files = dumped
    rejected(folder, config, rf"{files[0]} .* has \d \(adam\) of", optimizer="adam")


def test_state_that_no_optimizer_of_persia_has_is_rejected(tmp_path):
    rows = [Row(prefixed(1, 2, 8), np.ones(3 + 4, dtype=np.float32), 3)]
    (path,) = write_checkpoint(tmp_path / "persia", rows, np.random.default_rng(0))
    config = config_file(tmp_path)
    rejected(
        tmp_path / "persia",
        config,
        rf"{path} .* byte \d+: .* 7 floats of dim 3; 'user'",
    )


def test_rows_of_one_weight_leave_the_kind_of_adagrad_to_the_others(tmp_path):
    rng = np.random.default_rng(0)
    rows = {"adagrad": [], "adagrad_vectorwise_shared": []}
    for name, of_name in rows.items():
        for group in ("stacked", "user"):
            of_name += rows_of(group, [3], 8, OPTIMIZERS[name][1], rng)
        write_checkpoint(tmp_path / name, of_name, rng, num_shards=30)
        saved = convert_checkpoint(
            Conversion(
                source=str(tmp_path / name),
                destination=str(tmp_path / name / "run"),
                embedding_config=config_file(tmp_path),
            )
        )
        (table, *_) = Manifest.read(saved).tables
        shared = name.endswith("shared")
        assert table.spec.optimizer == Adagrad(vectorwise_shared=shared)


def test_a_checkpoint_without_rows_needs_the_optimizer(tmp_path):
    write_checkpoint(tmp_path / "persia", [], np.random.default_rng(0))
    config = config_file(tmp_path)
    rejected(tmp_path / "persia", config, "optimizer must be given .* has no rows")
    saved = convert_checkpoint(
        conversion(tmp_path / "persia", config, optimizer="adam")
    )
    assert Manifest.read(saved).num_rows == 0


def test_servers_of_inference_serve_it(dumped, servers):
    folder, config, rows, _ = dumped
    saved = convert_checkpoint(conversion(folder, config))
    client = servers.client(servers.start(3, checkpoint=saved.url))

    def are_ready():
        with contextlib.suppress(RemoteError):
            return sum(client.num_rows()) == len(rows)

    wait_until(are_ready, "the servers are ready")


def test_a_trainer_continues_with_both_halves(tmp_path, monkeypatch, caplog):
    rng = np.random.default_rng(0)
    ids = [prefixed(id_, 1, 8) for id_ in (7, 2**64 - 1)]
    weights = rng.uniform(-1, 1, (2, 4)).astype(np.float32)
    rows = [Row(id_, w, 4) for id_, w in zip(ids, weights, strict=True)]
    source, run = tmp_path / "persia", tmp_path / "run"
    write_checkpoint(source, rows, rng, num_servers=2)
    model = SumOfEmbeddings()
    torch.nn.init.constant_(model.bias, 0.25)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.125)
    torch.save({"module.bias": model.bias.detach()}, source / "dense.pt")
    torch.save(optimizer.state_dict(), source / "opt.pt")
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), source / "jit_dense.pt")
    with LocalJob(tmp_path, monkeypatch, num_servers=3) as job:
        arguments = [str(source), str(run), "--embedding-config", str(job.config_path)]
        assert main(arguments) == 0
        model = SumOfEmbeddings()
        ctx = job.train_ctx(model, SGD(1.0))
        ctx.dense_optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
        with ctx:
            ctx.load_checkpoint(str(run))
            assert model.bias.item() == 0.25
            assert ctx.dense_optimizer.param_groups[0]["lr"] == 0.125
            assert np.array_equal(job.read("item", 7), weights[:1])
            batches = Batches([batch_of([7])])
            for batch in DataLoader(batches):
                output, _ = ctx.forward(batch)
                expected = 0.25 + weights[0].astype(np.float64).sum()
                assert output.item() == pytest.approx(expected, rel=1e-6)
                ctx.backward(output.sum())
            ctx.embeddings.flush()
            np.testing.assert_allclose(job.read("item", 7), weights[:1] - 1, rtol=1e-6)
    for folder in (run, run / "checkpoint-00000001"):
        copied = (folder / "jit_dense.pt").read_bytes()
        assert copied == (source / "jit_dense.pt").read_bytes()


def test_the_command_reports_why_it_fails(dumped, capsys):
    folder, config, _, _ = dumped
    (folder / "embedding_dump_done").unlink()
    arguments = [str(folder), str(folder.parent / "run"), "--embedding-config", config]
    assert main(arguments) == 1
    assert "CheckpointError: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(arguments[:1])
    assert "required: destination" in capsys.readouterr().err


def test_a_negative_step_is_rejected(dumped):
    folder, config, _, _ = dumped
    with pytest.raises(ConfigError, match=r"adam_step must be in \[0, "):
        conversion(folder, config, adam_step=-1)


def test_the_source_is_not_written_to(dumped):
    folder, config, _, _ = dumped
    same = Conversion(
        source=str(folder),
        destination=f"{folder}/../{folder.name}",
        embedding_config=config,
    )
    with pytest.raises(ConfigError, match="destination must be a separate folder"):
        convert_checkpoint(same)
