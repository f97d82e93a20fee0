"""How Hypothesis searches, and the servers that tests of several folders start.

``pytest --hypothesis-profile=nightly`` searches longer and with new random numbers.
"""

import pytest
from hypothesis import settings

from tests.servers import Servers

settings.register_profile(
    "ci",
    max_examples=60,
    stateful_step_count=30,
    derandomize=True,
    deadline=None,
    print_blob=True,
)
settings.register_profile(
    "nightly",
    max_examples=1000,
    stateful_step_count=50,
    deadline=None,
    print_blob=True,
)
settings.load_profile("ci")


@pytest.fixture
def servers():
    with Servers() as servers:
        yield servers
