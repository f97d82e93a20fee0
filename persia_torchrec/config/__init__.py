"""The two YAML files of a job, read into frozen structs.

``embedding_config.yml`` says which features are embedded and how,
``global_config.yml`` what the servers and embedding workers may use. Their keys and
defaults are PERSIA's. Unlike PERSIA, this package rejects unknown keys, duplicate keys
and values of another type. Keys that PERSIA's own files and pages have and that have
no effect, there or here, are an exception: ``differences.toml`` lists them, and each is
a warning.
"""

from persia_torchrec.config.embedding_config import (
    EmbeddingSchema,
    FeatureGroup,
    SlotConfig,
    index_prefix,
    load_embedding_config,
    parse_embedding_config,
)
from persia_torchrec.config.global_config import (
    EmbeddingWorkerSettings,
    GlobalSettings,
    InferSettings,
    MetricsSettings,
    inference_settings,
    load_global_config,
    refuse_inference,
)
from persia_torchrec.config.yaml_file import parse_yaml, read_text

__all__ = [
    "EmbeddingSchema",
    "EmbeddingWorkerSettings",
    "FeatureGroup",
    "GlobalSettings",
    "InferSettings",
    "MetricsSettings",
    "SlotConfig",
    "index_prefix",
    "inference_settings",
    "load_embedding_config",
    "load_global_config",
    "parse_embedding_config",
    "parse_yaml",
    "read_text",
    "refuse_inference",
]
