import pytest

from tests.support.local_job import LocalJob
from tests.support.yaml_configs import global_config  # noqa: F401


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return a job whose embedding config has one slot, ``item``."""
    with LocalJob(tmp_path, monkeypatch) as job:
        yield job
