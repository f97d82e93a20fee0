"""A clock that the test moves."""

SLICE_S = 0.001
"""What each slice seems to take."""


class Clock:
    """Time passes when the test says so, CPU time with each slice."""

    def __init__(self):
        self.now_s = 100.0
        self.cpu_s = 0.0
        self.num_calls = 0

    def monotonic(self):
        return self.now_s

    def thread_time(self):
        """Return the CPU time, which passes between two calls of this."""
        self.num_calls += 1
        self.cpu_s += SLICE_S
        return self.cpu_s
