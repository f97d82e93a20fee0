import io
from pathlib import Path

import pytest
import torch
import yaml

from examples.adult_income import adult, model
from persia_torchrec.training.checkpoint import script_bytes

FOLDER = Path(model.__file__).parent


def test_the_model_gives_one_probability_per_sample_from_half_precision_embeddings():
    network = model.DNN()
    embeddings = [torch.randn(6, 8).half().requires_grad_() for _ in range(8)]
    output = network([torch.randn(6, 5)], embeddings)
    assert (output.shape, output.dtype) == ((6, 1), torch.float32)
    assert bool(((output >= 0) & (output <= 1)).all())
    output.sum().backward()
    assert all(embedding.grad is not None for embedding in embeddings)


def test_every_id_column_has_a_slot_as_wide_as_the_model_expects():
    config = yaml.safe_load((FOLDER / "embedding_config.yml").read_text())
    slots = config["slots_config"]
    assert list(slots) == list(adult.ID_COLUMNS)
    assert len(slots) == model.NUM_SLOTS
    assert {slot["dim"] for slot in slots.values()} == {model.EMBEDDING_DIM}
    assert len(adult.DENSE_COLUMNS) == model.NUM_DENSE


def test_the_checkpoint_at_the_end_may_hold_the_model_as_a_script():
    dnn = model.DNN().eval()
    dense, embeddings = [torch.rand(3, 5)], [torch.rand(3, 8) for _ in range(8)]
    data = script_bytes(dnn)
    with pytest.warns((DeprecationWarning, FutureWarning), match=r"torch.jit"):
        script = torch.jit.load(io.BytesIO(data))
    assert torch.equal(script(dense, embeddings), dnn(dense, embeddings))
