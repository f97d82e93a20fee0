from tests.support.served_model import trained  # noqa: F401  # a fixture
