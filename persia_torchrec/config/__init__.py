"""The two YAML files of a job, read into frozen dataclasses.

``embedding_config.yml`` says which features are embedded and how,
``global_config.yml`` what the servers and embedding workers may use. Their keys and
defaults are PERSIA's; what PERSIA ignores in them is refused here: unknown keys, keys
given twice, values of another type. Keys that PERSIA's own files and pages have and
that do nothing there, or nothing here, are the exception: ``differences.py`` lists
them, and each is a warning.
"""

from persia_torchrec.config.embedding_config import (
    EmbeddingSchema,
    FeatureGroup,
    SlotConfig,
    load_embedding_config,
    parse_embedding_config,
)
from persia_torchrec.config.global_config import (
    CheckpointingSettings,
    CommonSettings,
    EmbeddingParameterServerSettings,
    EmbeddingWorkerSettings,
    GlobalSettings,
    InferSettings,
    MetricsSettings,
    load_global_config,
)
from persia_torchrec.config.job_type import inference_settings, refuse_inference
from persia_torchrec.config.yaml_file import read_text, read_yaml

__all__ = [
    "CheckpointingSettings",
    "CommonSettings",
    "EmbeddingParameterServerSettings",
    "EmbeddingSchema",
    "EmbeddingWorkerSettings",
    "FeatureGroup",
    "GlobalSettings",
    "InferSettings",
    "MetricsSettings",
    "SlotConfig",
    "inference_settings",
    "load_embedding_config",
    "load_global_config",
    "parse_embedding_config",
    "read_text",
    "read_yaml",
    "refuse_inference",
]
