"""Each call of a context that takes a path: one that is missing, empty, a file."""

import pytest
import torch

from persia_torchrec.embedding import EmbeddingConfig
from persia_torchrec.errors import PersiaError
from tests.support.local_job import ONE_SLOT, LocalJob


@pytest.fixture(scope="module")
def ctx(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    with (
        pytest.MonkeyPatch.context() as patch,
        LocalJob(folder, patch, ONE_SLOT) as job,
        job.train_ctx(embedding_config=EmbeddingConfig((-1, 1))) as ctx,
    ):
        yield ctx


def dump_checkpoint(ctx, path):
    ctx.dump_checkpoint(path)


def dump_embedding(ctx, path):
    ctx.dump_embedding(path)


def dump_state(ctx, path):
    ctx.dump_torch_state_dict(torch.nn.Linear(1, 1), path, "model.pt")


def load_checkpoint(ctx, path):
    ctx.load_checkpoint(path)


def load_embedding(ctx, path):
    ctx.load_embedding(path)


def load_state(ctx, path):
    ctx.load_torch_state_dict(torch.nn.Linear(1, 1), path)


def load_state_within(ctx, path):
    ctx.load_torch_state_dict(torch.nn.Linear(1, 1), f"{path}/model.pt")


DUMPS = dump_checkpoint, dump_embedding, dump_state
LOADS = load_checkpoint, load_embedding


@pytest.mark.parametrize("call", [*DUMPS, *LOADS, load_state])
def test_no_path_is_an_error_that_reports_what_a_path_must_be(call, ctx):
    with pytest.raises(PersiaError, match=r"must .*Received: ''"):
        call(ctx, "")


@pytest.mark.parametrize("call", [*DUMPS, *LOADS, load_state_within])
def test_a_file_in_the_place_of_a_folder_is_an_error_that_names_it(call, ctx, tmp_path):
    path = tmp_path / "manifest.json"
    path.write_text("{}")
    with pytest.raises(PersiaError) as caught:
        call(ctx, str(path))
    assert f"{path} must be a folder. Received: a file" in str(caught.value)
    assert path.read_text() == "{}"


@pytest.mark.parametrize("call", [*LOADS, load_state, load_state_within])
def test_a_path_where_nothing_is_is_an_error(call, ctx, tmp_path):
    path = tmp_path / "misspelt"
    with pytest.raises(PersiaError, match=r"misspelt.*(no such folder|must exist)"):
        call(ctx, str(path))
    assert not path.exists()


@pytest.mark.parametrize("call", LOADS)
def test_an_empty_folder_is_an_error(call, ctx, tmp_path):
    with pytest.raises(PersiaError, match=r"Received: an empty folder"):
        call(ctx, str(tmp_path))


@pytest.mark.parametrize("call", [load_state, load_state_within])
def test_an_empty_folder_in_the_place_of_a_file_is_an_error_that_names_it(
    call, ctx, tmp_path
):
    with pytest.raises(PersiaError, match=str(tmp_path)):
        call(ctx, str(tmp_path))


def test_a_dump_begins_where_there_is_no_folder_yet(ctx, tmp_path):
    for number, call in enumerate(DUMPS):
        call(ctx, str(tmp_path / "new" / str(number)))
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["0", "1", "2"]
