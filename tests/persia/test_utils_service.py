import pytest

from persia_torchrec.errors import ConfigError
from persia_torchrec.persia.utils import get_embedding_worker_services


@pytest.mark.parametrize(
    ("value", "addresses"),
    [
        (None, ["embedding_worker:8887"]),
        ("", ["embedding_worker:8887"]),
        ("10.0.0.7:8887", ["10.0.0.7:8887"]),
        ("10.0.0.7:8887, worker-1:80", ["10.0.0.7:8887", "worker-1:80"]),
    ],
)
def test_workers_are_where_the_environment_says(monkeypatch, value, addresses):
    monkeypatch.delenv("EMBEDDING_WORKER_SERVICE", raising=False)
    if value is not None:
        monkeypatch.setenv("EMBEDDING_WORKER_SERVICE", value)
    assert get_embedding_worker_services() == addresses


def test_an_address_must_stand_between_commas(monkeypatch):
    monkeypatch.setenv("EMBEDDING_WORKER_SERVICE", "10.0.0.7:8887,")
    with pytest.raises(ConfigError, match=r"must list addresses .* '10\.0"):
        get_embedding_worker_services()
