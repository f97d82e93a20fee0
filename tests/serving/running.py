"""The inference server as a process; what it does not need is not imported here."""

import sys
from pathlib import Path

from persia_torchrec.serving.__main__ import main

ROOT = Path(__file__).parents[2]


class Serving:
    """An inference server, once it is ready."""

    def __init__(self, processes, *arguments, name="serving") -> None:
        # Its servers are processes of their own, and begin in another folder.
        env = {"PYTHONPATH": str(ROOT)}
        self.process = processes.start(name, run_serving, *arguments, env=env)
        self.process.has_printed("ready http://127.0.0.1:")
        self.address = self.process.output().partition("ready ")[2].split()[0]


def run_serving(*arguments):
    sys.argv = ["serving", *arguments]
    return main()
