"""Requests at a rate to an inference server; each is counted by its answer."""

import http.client
import threading
import time
from collections import Counter

import numpy as np

from tests.support.serving_process import ask

NO_ANSWER = 0
"""What is counted of a request whose connection was not made, or broke."""


class Load:
    """Requests at a rate, whether or not they are answered, until a block ends.

    ``statuses`` counts the answers, ``wrong`` those of status 200 that differ by more
    than 1e-6 from each of the ``expected`` predictions, and ``sent`` all requests;
    ``found`` those that are like the n-th of these.
    """

    def __init__(
        self, address, body, *expected, rate=50, num_threads=10, path="/predict"
    ):
        self.statuses, self.wrong, self.sent = Counter(), 0, 0
        self.found = [0] * len(expected)
        self._request = address, path, body
        self._expected = expected
        self._interval_s = num_threads / rate
        self._ending, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._ask) for _ in range(num_threads)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def _ask(self):
        due_s = time.monotonic()
        while not self._ending.wait(max(due_s - time.monotonic(), 0)):
            due_s += self._interval_s
            with self._lock:
                self.sent += 1
            try:
                status, answer = ask(*self._request)
            except (OSError, http.client.HTTPException):
                status, answer = NO_ANSWER, {}
            with self._lock:
                self.statuses[status] += 1
                if status == 200:
                    self._compare(answer["predictions"])

    def _compare(self, predictions):
        for number, expected in enumerate(self._expected):
            if np.allclose(predictions, expected, atol=1e-6):
                self.found[number] += 1
                return
        self.wrong += 1
