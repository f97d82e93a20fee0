from pathlib import Path

import torch
import yaml

from examples.adult_income import adult, model

FOLDER = Path(model.__file__).parent


def test_the_model_gives_one_probability_a_row_from_half_precision_embeddings():
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
