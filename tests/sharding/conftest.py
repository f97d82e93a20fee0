import pytest

from tests.sharding.remote_job import RemoteJob


@pytest.fixture
def job():
    with RemoteJob() as job:
        yield job
