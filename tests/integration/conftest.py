import pytest

from tests.support.remote_job import RemoteJob
from tests.support.served_model import trained  # noqa: F401  # a fixture


@pytest.fixture
def job():
    with RemoteJob() as job:
        yield job
