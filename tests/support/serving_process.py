"""The inference server as a process; what it does not need is not imported here."""

import json
import sys
import urllib.error
import urllib.request

from persia_torchrec.serving.__main__ import main
from tests.support.processes import DEADLINE_S
from tests.support.repository import ROOT

BYTES, JSON = "application/octet-stream", "application/json"


def ask(address, path, body=None, kind=BYTES):
    """Return the status and the JSON of an answer."""
    request = urllib.request.Request(address + path, body, {"Content-Type": kind})
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def predict(address, body, kind=BYTES):
    """Return the predictions for a batch as bytes."""
    status, answer = ask(address, "/predict", body, kind)
    assert status == 200, answer
    return answer["predictions"]


def predict_all(address, batches):
    return [predict(address, batch.to_bytes()) for batch in batches]


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
