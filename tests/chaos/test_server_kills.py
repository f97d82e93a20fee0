"""Many kills of embedding servers in the middle of training."""

import pytest

from tests.server.test_restarts import train_through_kills

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def test_no_update_is_lost_or_applied_twice_in_many_kills(servers):
    train_through_kills(servers, num_kills=40)
