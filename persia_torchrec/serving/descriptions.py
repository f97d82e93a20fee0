"""What an inference server says of itself and its models, over HTTP and over gRPC."""

from collections.abc import Mapping
from typing import Any

from persia_torchrec.errors import without_secrets
from persia_torchrec.serving import inference_protocol as protocol
from persia_torchrec.serving.models import Models, Prediction, ServedModel, Version
from persia_torchrec.version import __version__

_EXTENSIONS = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "statistics",
)


def describe_server() -> dict[str, Any]:
    """Return the server's metadata of the protocol."""
    return {
        "name": "persia_torchrec",
        "version": __version__,
        "extensions": list(_EXTENSIONS),
    }


def describe_model(model: ServedModel, number: str | None) -> dict[str, Any]:
    """Return a model's metadata of the protocol."""
    signature = model.signature(number)
    return {
        "name": model.name,
        "versions": model.versions(),
        "platform": "persia_torchrec_torchscript",
        "inputs": protocol.describe_inputs(signature),
        "outputs": [protocol.describe_output(signature)],
    }


def describe_config(model: ServedModel, number: str | None) -> dict[str, Any]:
    """Return a model's configuration of the protocol's extension."""
    metadata = describe_model(model, number)

    def tensors(of: str) -> list[dict[str, Any]]:
        return [
            {
                "name": tensor["name"],
                "data_type": f"TYPE_{tensor['datatype']}",
                "dims": tensor["shape"],
                "optional": tensor["name"].endswith(protocol.LENGTHS),
            }
            for tensor in metadata[of]
        ]

    return {
        "name": model.name,
        "platform": metadata["platform"],
        "max_batch_size": 0,
        "input": tensors("inputs"),
        "output": tensors("outputs"),
    }


def describe_stats(
    models: Models, name: str, number: str | None
) -> list[Mapping[str, Any]]:
    """Return the statistics of a version, of all of a model, or, without name, of all.

    Raises:
        UnknownModelError: the model or the version is not loaded.
    """
    found: list[Mapping[str, Any]] = []
    for model in [models[name]] if name else models:
        if name:
            with model.using(number):
                pass
        versions = [number] if number else model.versions()
        found += models.statistics.of_versions(model.name, versions)
    return found


def describe_index(models: Models, *, only_ready: bool = False) -> list[dict[str, str]]:
    """Return name, version, state and reason of each version, or of a model without."""
    index = []
    for model in models:
        ready = {"name": model.name, "state": "READY", "reason": ""}
        index += [{**ready, "version": number} for number in model.versions()]
        if not model.versions() and not only_ready:
            gone = {"state": "UNAVAILABLE", "reason": "unloaded"}
            index.append({"name": model.name, "version": "", **gone})
    return index


def describe_answer(
    model: ServedModel, version: Version, answer: Prediction
) -> dict[str, Any]:
    """Return the checkpoint and the age of rows of an answer, and if it is degraded."""
    about: dict[str, Any] = {
        "checkpoint": without_secrets(version.predictor.model.path.rpartition("/")[0])
    }
    if (age_s := model.rows_age_s()) is not None:
        about["rows_age_s"] = round(age_s, 3)
    return {**about, "degraded": True} if answer.is_degraded else about
