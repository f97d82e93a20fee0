import pytest
import torch

from tests.support.remote_job import RemoteJob


@pytest.fixture
def job():
    with RemoteJob() as job:
        yield job


@pytest.fixture(scope="module")
def shared_job():
    with RemoteJob() as job:
        yield job


@pytest.fixture
def one_thread():
    """Run small operators in one thread: two wait for each other on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
