"""PERSIA's YAML files: one that has every section, and fixtures that read a text."""

import pytest

from persia_torchrec.embedding.embedding_config import load_embedding_config
from persia_torchrec.persia.global_config import load_global_config

# As PERSIA's own example has them, and every other key that it knows.
GLOBAL = """
common_config:
  metrics_config:
    enable_metrics: false
    job_name: adult
    push_interval_seconds: 5
  job_type: Train
  checkpointing_config:
    num_workers: 8
embedding_worker_config:
  forward_buffer_size: 100
  buffered_data_expired_sec: 60
embedding_parameter_server_config:
  capacity: 1000000
  num_hashmap_internal_shards: 1
  enable_incremental_update: false
  incremental_buffer_size: 5
  incremental_dir: /tmp/increments
  incremental_channel_capacity: 7
"""


def infer(settings):
    """Return the text of a file for inference."""
    return f"common_config: {{job_type: Infer, infer_config: {{{settings}}}}}"


@pytest.fixture
def embedding_config(tmp_path):
    def load(text):
        path = tmp_path / "embedding_config.yml"
        path.write_text(text, encoding="utf-8")
        return load_embedding_config(path)

    return load


@pytest.fixture
def global_config(tmp_path):
    def load(text):
        path = tmp_path / "global_config.yml"
        path.write_text(text, encoding="utf-8")
        return load_global_config(str(path))

    return load
