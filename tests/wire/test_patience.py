from persia_torchrec import timeouts
from persia_torchrec.wire.patience import Patience


def test_time_runs_out_at_the_deadline_where_no_process_compiles():
    patience = Patience(10.0, 0.0)
    assert [patience.is_over(3, now) for now in (0.0, 9.9, 10.0)] == [
        *(False, False),
        True,
    ]


def test_the_time_in_which_a_process_compiles_does_not_count():
    patience = Patience(10.0, 0.0)
    assert not patience.is_over(0, 9.0)
    for second in range(1, 100):
        assert not patience.is_over(second, 9.0 + second)
    assert not patience.is_over(99, 109.0)  # the last heartbeat holds for a while
    assert patience.is_over(99, 200.0)


def test_a_process_that_compiles_for_ever_extends_a_deadline_only_so_far():
    patience = Patience(10.0, 0.0)
    overs = [patience.is_over(second, float(second)) for second in range(2000)]
    assert overs.index(True) == 10 + timeouts.COMPILING_S
