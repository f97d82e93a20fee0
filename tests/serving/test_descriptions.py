"""What an inference server says of itself and its models."""

import numpy as np
import pytest

from persia_torchrec.serving.descriptions import (
    describe_answer,
    describe_config,
    describe_index,
    describe_model,
    describe_server,
    describe_stats,
)
from persia_torchrec.serving.models import Models, Prediction, UnknownModelError
from persia_torchrec.version import __version__
from tests.support.item_model import version_of


@pytest.fixture
def models(servers):
    models = Models()
    path = "https://user:secret@host/runs/7/m.pt"
    version = version_of(servers.client(servers.start(1)), 1.5, path)
    models.add("ads").add(version)
    models.add("gone")
    yield models
    models.close()


def test_the_server_tells_its_version_and_what_it_has():
    told = describe_server()
    assert told["version"] == __version__
    assert "model_repository" in told["extensions"]


def test_a_model_is_described_by_its_signature(models):
    told = describe_model(models["ads"], None)
    assert (told["name"], told["versions"]) == ("ads", ["1"])
    assert {one["name"]: one["datatype"] for one in told["inputs"]}["item"] == "INT64"
    config = describe_config(models["ads"], "1")
    kinds = {one["name"]: one["data_type"] for one in config["input"]}
    assert kinds["item"] == "TYPE_INT64"
    assert [one["optional"] for one in config["input"] if one["name"] == "item"] == [
        False
    ]
    assert [one["name"] for one in config["output"]] == [
        one["name"] for one in told["outputs"]
    ]


def test_the_index_has_versions_and_models_without_one(models):
    every = {
        (one["name"], one["version"], one["state"]) for one in describe_index(models)
    }
    assert every == {("ads", "1", "READY"), ("gone", "", "UNAVAILABLE")}
    assert [one["name"] for one in describe_index(models, only_ready=True)] == ["ads"]


def test_statistics_are_of_one_model_or_of_all(models):
    assert [one["name"] for one in describe_stats(models, "ads", "1")] == ["ads"]
    assert [one["name"] for one in describe_stats(models, "", None)] == ["ads"]
    with pytest.raises(UnknownModelError):
        describe_stats(models, "ads", "2")
    with pytest.raises(UnknownModelError):
        describe_stats(models, "other", None)


def test_an_answer_names_its_checkpoint_without_a_password(models):
    with models["ads"].using(None) as version:
        told = describe_answer(models["ads"], version, Prediction(np.zeros(1)))
        assert told["checkpoint"].endswith("//host/runs/7")
        assert "secret" not in told["checkpoint"]
        assert "degraded" not in told
        degraded = Prediction(np.zeros(1), is_degraded=True)
        assert describe_answer(models["ads"], version, degraded)["degraded"] is True
