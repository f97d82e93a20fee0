"""Every public call that takes a path, with one that is missing, empty, or a file."""

import contextlib
import re
from pathlib import Path

import pytest
from torchrec import EmbeddingBagConfig
from torchrec.distributed.sharding_plan import get_default_sharders

from persia_torchrec import (
    SGD,
    EmbeddingCluster,
    export_for_serving,
    load_checkpoint,
    recoverable,
    remote_sharders,
    save_checkpoint,
    save_delta,
)
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.datasets.columns import IdColumn
from persia_torchrec.datasets.formats import (
    ArrowDataset,
    CsvDataset,
    JsonDataset,
    NpyDataset,
    ParquetDataset,
)
from persia_torchrec.embedding.embedding_config import load_embedding_config
from persia_torchrec.errors import PersiaError
from persia_torchrec.persia.global_config import load_global_config
from tests.support.remote_job import Bags, RemoteJob, kjt_of


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    with RemoteJob(num_servers=1) as job:
        sharders = remote_sharders(job.client, SGD(0.1))
        config = EmbeddingBagConfig(50, 4, "table", feature_names=["x"])
        model = job.put_on_servers(Bags([config]))
        model(kjt_of({"x": [[1]]})).values().sum().backward()
        job.saved = job.client.checkpoints.dump(tmp_path_factory.mktemp("saved")).path
        yield job, model, sharders


def enter(context):
    with context:
        pass


def dump(path, job, *_):
    job.client.checkpoints.dump(path)


def save(path, job, model, sharders):
    save_checkpoint(path, {"model": model}, job.client, sharders)


def continue_at(path, job, model, sharders):
    enter(recoverable(path, {"model": model}, job.client, sharders))


def load(path, job, *_):
    job.client.checkpoints.load(path)


def load_increments(path, job, *_):
    job.client.checkpoints.load(job.saved, increments=path)


def load_both(path, job, model, _):
    load_checkpoint(path, {"model": model}, job.client)


def add_delta(path, job, model, sharders):
    save_delta(path, {"model": model}, job.client, sharders)


def serve(path, *_):
    EmbeddingCluster.of_checkpoint(path)


def read_embedding_config(path, *_):
    load_embedding_config(path)


def read_global_config(path, *_):
    load_global_config(path)


def read_rows(path, *_):
    enter(contextlib.closing(CsvDataset(path, 1, [IdColumn("x")])))


def read_parquet(path, *_):
    enter(contextlib.closing(ParquetDataset(path, 1, [IdColumn("x")])))


def read_json(path, *_):
    enter(contextlib.closing(JsonDataset(path, 1, [IdColumn("x")])))


def read_arrow(path, *_):
    enter(contextlib.closing(ArrowDataset(path, 1, [IdColumn("x")])))


def read_npy(path, *_):
    is_as_given = not path or Path(path).is_dir()
    file = path if is_as_given else f"{path}_dense.npy"
    enter(contextlib.closing(NpyDataset(file, 1, [IdColumn("cat_0")])))


def export(path, job, model, _):
    export_for_serving(model, path, job.client, [])  # the path is looked at first


def write_increments(path, *_):
    EmbeddingCluster.local(1, increments_dir=path)


MAKERS = dump, save, continue_at, export
READERS = load, load_increments, load_both, add_delta, serve
DATA = read_rows, read_parquet, read_json, read_arrow, read_npy
FILES = read_embedding_config, read_global_config, *DATA


@pytest.mark.parametrize("call", [*MAKERS, *READERS, *FILES])
def test_no_path_is_an_error_that_reports_what_a_path_must_be(call, trained):
    with pytest.raises(PersiaError, match=r"must (be|name) "):
        call("", *trained)


@pytest.mark.parametrize("call", [*MAKERS, *READERS])
def test_a_file_in_the_place_of_a_folder_is_an_error_that_names_it(
    call, trained, tmp_path
):
    path = tmp_path / "manifest.json"
    path.write_text("{}")
    with pytest.raises(PersiaError) as caught:
        call(str(path), *trained)
    assert f"{path} must be a folder. Received: a file" in str(caught.value)


@pytest.mark.parametrize("call", [*READERS, *FILES])
def test_a_path_where_nothing_is_is_an_error(call, trained, tmp_path):
    path = tmp_path / "misspelt"
    with pytest.raises(
        PersiaError, match=r"no such folder|nothing of that name|No such f"
    ):
        call(str(path), *trained)
    assert not path.exists()


@pytest.mark.parametrize("call", [load, load_both, add_delta, serve])
def test_an_empty_folder_is_an_error(call, trained, tmp_path):
    with pytest.raises(PersiaError, match=r"Received: an empty folder"):
        call(str(tmp_path), *trained)


@pytest.mark.parametrize("call", DATA)
def test_an_empty_folder_in_the_place_of_a_file_is_an_error_that_names_it(
    call, trained, tmp_path
):
    with pytest.raises(PersiaError, match=re.escape(str(tmp_path))):
        call(str(tmp_path), *trained)


def test_arrays_of_numpy_are_files_of_that_name(trained, tmp_path):
    path = tmp_path / "day_dense.npy"
    path.mkdir()
    with pytest.raises(PersiaError, match=f"{path} must be a file. Received: a f"):
        read_npy(str(path))
    path.rmdir()
    path.write_bytes(b"")
    with pytest.raises(PersiaError, match=r"day_\w+\.npy must be an array"):
        read_npy(str(tmp_path / "day"))


@pytest.mark.slow
@pytest.mark.parametrize("is_file", [False, True])
def test_increments_have_a_folder(trained, tmp_path, is_file):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(PersiaError):
        write_increments(str(path) if is_file else "", *trained)


def test_a_run_begins_where_there_is_no_folder_yet(trained, tmp_path):
    for number, call in enumerate([dump, save, continue_at]):
        call(str(tmp_path / "new" / str(number)), *trained)
    assert Folder(tmp_path / "new").described() == "a folder with 0, 1, 2"


def test_sharders_may_be_a_list(trained, tmp_path):
    job, model, sharders = trained
    for given in (sharders, list(sharders), [sharders[0]], iter(sharders)):
        with recoverable(tmp_path, {"model": model}, job.client, given) as run:
            run.save()
    save(tmp_path, job, model, list(sharders))
    assert len(Folder(tmp_path).names()) == 3  # the two newest, and that of save()


@pytest.mark.parametrize("given", [[object()], get_default_sharders(), None])
def test_sharders_without_tables_on_servers_are_rejected(given, trained, tmp_path):
    job, model, _ = trained
    with pytest.raises(PersiaError, match=r"sharders must be remote_sharders"):
        save(tmp_path, job, model, given)
