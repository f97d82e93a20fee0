"""What a coordinator serves over HTTP of a job whose members are this test."""

import json
import math
import re
import urllib.request

import msgspec
import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from persia_torchrec.job import job_list
from persia_torchrec.job.process_identity import METRICS_AT, ProcessIdentity
from persia_torchrec.job.progress import Point, Progress
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.requests import Beat, ClaimSize, Register, Report, View
from persia_torchrec.job.saves import LAST_CHECKPOINT
from persia_torchrec.job.status_page import StatusPage, thinned
from persia_torchrec.metrics.values import Durations
from tests.support.ports import draw_port
from tests.support.servers import DEADLINE_S


@pytest.fixture
def book():
    book = AddressBook.host(0, job_id="seven")
    yield book
    book.close()


@pytest.fixture
def page(book, monkeypatch):
    """The page of a job at which the test looks, as a thread else does."""
    monkeypatch.setenv("PERSIA_METRICS_PORT", str(draw_port()))
    progress = Progress(book)
    record = job_list.record_of("seven", book.port)
    with StatusPage(book, progress, record, "127.0.0.1") as page:
        page.look = progress.look
        yield page


class Member:
    """A process of the job, which is this one."""

    def __init__(self, book, role, index=0, size=1):
        self.who, self._book, self._place = f"{role} {index}", book, (role, index)
        self.process = ProcessIdentity.of_this_process()
        book.call(ClaimSize(role, index, size, f"tcp://127.0.0.1:70{index}0"), int)
        book.call(Register(role, index, self.process, log="node3 /logs/a"), str)

    def beats(self, progress=0, **numbers):
        beat = Beat(*self._place, self.process.nonce, progress, figures=numbers)
        told = msgspec.json.decode(msgspec.json.encode(beat), type=Beat)
        self._book.call(told, View)

    def serves(self, address):
        self._book.tell(METRICS_AT + self.who, address)

    def leaves(self):
        self._book.call(Report(*self._place, left=self.process), bool)


def get(page, path):
    url = f"http://127.0.0.1:{page.endpoint.port}{path}"
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


def status(page):
    text, kind = get(page, "/status.json")
    assert kind == "application/json"
    return json.loads(text)


def test_targets_are_the_endpoints_of_the_members_that_are_there(book, page):
    Member(book, "server", 0, 2).serves("127.0.0.1:9001")
    gone = Member(book, "server", 1, 2)
    gone.serves("127.0.0.1:9002")
    gone.leaves()
    Member(book, "trainer")  # that serves none
    text, kind = get(page, "/targets")
    assert kind == "application/json"
    labels = {"job": "seven", "job_id": "seven", "instance": "rep_0"}
    assert json.loads(text) == [
        {
            "targets": ["127.0.0.1:9001"],
            "labels": {**labels, "role": "embedding_parameter_server"},
        },
        {
            "targets": [f"127.0.0.1:{page.endpoint.port}"],
            "labels": {**labels, "role": "coordinator"},
        },
    ]


def test_the_status_has_a_line_for_each_member_with_rates_between_two_looks(book, page):
    server, trainer = Member(book, "server"), Member(book, "trainer")
    durations = Durations()
    counted = {"rows": 5, "capacity_rows": 9, "bytes": 70, "evictions": 0}
    counted |= {"requests_lookup": 10, "requests_update": 10, "updates_queued": 3}
    counted |= {"idle_us": 0, "lookup_us": 1000}
    server.beats(at_s=100.0, memory_bytes=7, **counted)
    trainer.beats(30, step=30, samples=100, loss=0.5, at_s=50.0, lookups=4)
    page.look()
    before = {one["role"]: one for one in status(page)["members"]}
    assert before["server"]["rows"] == 5
    assert before["server"]["memory_bytes"] == 7
    assert before["server"]["lookups_a_second"] is None
    assert before["trainer"]["step"] == 30
    for us in [20] * 99 + [1000]:
        durations.add(us * 1000)
    later = {"requests_lookup": 110, "idle_us": 9_000_000, "lookup_us": 1_001_000}
    server.beats(at_s=110.0, **counted | later | durations.counters("lookup"))
    waits = {"row_wait_seconds": 1.0, "batches_lacking": 8, "lookups": 8}
    waits |= {"cache_hits": 30, "cache_misses": 10, "cache_dirty_rows": 7}
    waits |= {"cache_moved_bytes": 600, "cache_plain_bytes": 1000}
    trainer.beats(50, step=50, samples=500, loss=0.25, at_s=54.0, **waits)
    page.look()
    page.look()  # nothing new was said
    found = status(page)
    assert (found["job"], found["state"], found["step"]) == ("seven", "running", 50)
    assert (found["samples_a_second"], found["loss"]) == (100.0, 0.25)
    assert found["checkpoint"] is None
    lines = {one["role"]: one for one in found["members"]}
    assert lines["server"]["lookups_a_second"] == 10.0
    assert lines["server"]["idle"] == 0.9
    assert lines["server"]["lookup_us"] == 10_000
    assert 16 <= lines["server"]["p99_us"] <= 32
    assert lines["server"]["port"] == 7000
    assert lines["server"]["host"] == "node3"
    assert lines["trainer"]["steps_a_second"] == 5.0
    assert lines["trainer"]["waits"] == 0.25
    assert lines["trainer"]["cache_hits"] == 0.75
    assert lines["trainer"]["cache_saves"] == 0.4
    assert lines["trainer"]["dirty_rows"] == 7
    assert lines["trainer"]["staleness"] == 2.0
    curves = found["curves"]
    assert curves["loss"] == [0.5, 0.25, 0.25]
    assert curves["lookups_a_second"] == [None, 10.0, 10.0]
    assert curves["rows"] == [5.0, 5.0, 5.0]
    assert curves["at_s"] == sorted(curves["at_s"])
    assert curves["at_s"][-1] <= 0


def test_a_loss_that_is_not_a_number_leaves_a_gap(book, page):
    trainer = Member(book, "trainer")
    trainer.beats(1, step=1, loss=math.nan)
    page.look()
    assert status(page)["loss"] is None


def test_rates_do_not_span_a_restart(book, page):
    server = Member(book, "server")
    server.beats(requests_lookup=500, at_s=100.0)
    page.look()
    nonce = server.process.nonce
    server.process = structs.replace(server.process, nonce="next")
    again = Register("server", 0, server.process, nonce)
    assert book.call(again, str) == "next"
    server.beats(requests_lookup=5, at_s=102.0)
    page.look()
    (line,) = status(page)["members"]
    assert line["lookups_a_second"] is None
    server.beats(requests_lookup=25, at_s=104.0)
    page.look()
    assert status(page)["members"][0]["lookups_a_second"] == 10.0


def test_the_newest_checkpoint_and_its_time_are_known(book, page, tmp_path):
    folder = tmp_path / "checkpoint-00000001"
    folder.mkdir()
    book.tell(LAST_CHECKPOINT, str(folder))
    found = status(page)
    assert (found["checkpoint"], found["checkpoint_is_whole"]) == (str(folder), None)
    page.look()
    found = status(page)
    assert (found["checkpoint"], found["checkpoint_is_whole"]) == (str(folder), False)
    assert "persia_checkpoint_time_seconds" not in get(page, "/metrics")[0]
    assert "manifest" in found["checkpoint_error"]


def test_the_metrics_of_a_job_count_its_members_by_state(book, page):
    Member(book, "server", 0, 2)
    Member(book, "server", 1, 2).leaves()
    Member(book, "trainer").beats(12)
    text, _ = get(page, "/metrics")
    found = {
        (one.name, one.labels.get("state"), one.labels.get("member")): one
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }
    value = {key: one.value for key, one in found.items()}
    assert value["persia_members", "running", None] == 2
    assert value["persia_members", "left", None] == 1
    assert value["persia_members", "lost", None] == 0
    assert "persia_problem_seconds" not in {name for name, *_ in value}
    assert value["persia_restarts_total", None, "server 0"] == 0
    assert value["persia_job_step", None, None] == 12
    assert value["persia_job_running", None, None] == 1
    book.fail("server 0", "out of memory")
    assert "persia_job_failed" in get(page, "/metrics")[0]
    assert {one.labels["job_id"] for one in found.values()} == {"seven"}
    assert {one.labels["role"] for one in found.values()} == {"coordinator"}


def test_a_problem_is_a_metric_with_its_kind_and_the_member(book, page):
    gone = structs.replace(ProcessIdentity.of_this_process(), start="0")
    book.call(Register("server", 0, gone), str)
    found = status(page)
    assert [(one["kind"], one["who"]) for one in found["problems"]] == [
        ("killed", "server 0")
    ]
    text, _ = get(page, "/metrics")
    [line] = re.findall(r"^persia_problem_seconds\{(.*)\} ", text, re.M)
    assert 'kind="killed"' in line
    assert 'member="server 0"' in line


def test_the_page_needs_nothing_but_itself_and_its_status(page):
    text, kind = get(page, "/")
    assert kind == "text/html; charset=utf-8"
    assert "status.json" in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    names = {name for name in Point._fields if name not in ("at_s", "step")}
    assert all(f'["{name}",' in text for name in names)


def test_long_curves_are_thinned_to_their_means():
    nothing = Point(*[None] * len(Point._fields))
    points = [
        nothing._replace(
            at_s=1.0 * second, samples_a_second=1.0 * second, lookups_a_second=2.0
        )
        for second in range(1000)
    ]
    few = thinned(points, 100)
    assert len(few) == 100
    assert few[0].at_s == few[0].samples_a_second == 4.5
    assert few[0].loss is None
    assert few[-1].lookups_a_second == 2.0
    assert thinned(points[:7], 100) == points[:7]
    assert thinned([], 100) == []
