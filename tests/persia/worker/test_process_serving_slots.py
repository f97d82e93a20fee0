import pytest

from persia_torchrec.embedding.embedding_config import load_embedding_config
from persia_torchrec.errors import ConfigError, DiscoveryError
from persia_torchrec.persia.worker.process import ask_for_slots, tell_slots

SLOTS = """
slots_config:
  user: {dim: 4}
  item: {dim: 8, sqrt_scaling: true}
"""


@pytest.fixture
def write(tmp_path):
    def write(text, name="embedding_config.yml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def store_of(book):
    return "localhost", book.port


def test_trainers_learn_the_slots_that_a_worker_has(book, write):
    path = write(SLOTS)
    assert tell_slots(book, path) == load_embedding_config(path)
    asked = ask_for_slots(store_of(book), timeout_s=120)
    assert asked == load_embedding_config(path)
    assert list(asked.slots) == ["user", "item"]


def test_workers_may_write_the_same_slots_in_their_own_way(book, write):
    first = tell_slots(book, write(SLOTS))
    assert tell_slots(book, write("# the second\n" + SLOTS, "second.yml")) == first
    assert ask_for_slots(store_of(book), timeout_s=120) == first


def test_a_worker_with_other_slots_is_rejected(book, write):
    tell_slots(book, write(SLOTS))
    other = write(SLOTS.replace("true", "false"), "other.yml")
    with pytest.raises(ConfigError, match=r"same slots. Received: .*other\.yml, which"):
        tell_slots(book, other)


def test_a_file_with_a_mistake_is_not_told(book, write):
    with pytest.raises(ConfigError, match="slots_config must have at least one"):
        tell_slots(book, write("slots_config: {}"))
    with pytest.raises(DiscoveryError):
        ask_for_slots(store_of(book), timeout_s=0.1)
