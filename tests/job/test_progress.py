"""How a job goes: one line of progress, and the curves that it leaves."""

import csv
import logging

import pytest

from persia_torchrec.errors import DataError
from persia_torchrec.job import job_list, report
from persia_torchrec.job.process_identity import ProcessIdentity
from persia_torchrec.job.progress import CURVES, EVENTS, Point, Progress, told
from persia_torchrec.job.registry import AddressBook
from persia_torchrec.job.requests import Beat, ClaimSize, Register, View

NOTHING = Point(*[None] * len(Point._fields))


@pytest.fixture
def book():
    book = AddressBook.host(0, job_id="seven")
    yield book
    book.close()


def watched(book, folder=None):
    """Return the progress of a job, and its clock."""
    progress, now_s = Progress(book, folder), [0.0]
    progress._clock = lambda: now_s[0]
    progress._began_s = progress._said_s = progress._kept_s = 0.0
    return progress, now_s


def beat(book, role, **numbers):
    """Have a member join if it has not, and say what it has counted."""
    process = ProcessIdentity.of_this_process()
    if book.member(role, 0).process is None:
        book.call(ClaimSize(role, 0, 1, "tcp://127.0.0.1:7000"), int)
        book.call(Register(role, 0, process), str)
    nonce = book.member(role, 0).process.nonce
    step = int(numbers.get("step", 0))
    book.call(Beat(role, 0, nonce, step, figures=numbers), View)


def test_a_training_is_one_line_with_its_step_rate_loss_and_end(book, caplog):
    caplog.set_level(logging.INFO)
    progress, now_s = watched(book)
    progress.look()
    for step, at_s in ((100, 10.0), (200, 20.0)):
        beat(
            book,
            "trainer",
            step=step,
            last_step=1200,
            samples=512 * step,
            loss=0.25,
            at_s=at_s,
            lookups=step,
            batches_lacking=step / 2,
            cache_hits=step,
            cache_misses=step,
        )
        counted = {"hits": 9 * step, "misses": step, "requests_lookup": step}
        beat(book, "server", rows=7, at_s=at_s, **counted)
        now_s[0] = at_s
        progress.look()
    assert caplog.messages[-1] == (
        "step 200 of 1200, 5,120 samples/s, loss 0.25, hit rate 90.0 %, "
        "cached 50.0 %, staleness 0.50, ETA 1m40s"
    )


def test_a_job_that_serves_is_one_line_with_its_lookups():
    point = NOTHING._replace(at_s=0.0, lookups_a_second=1234.0, hit_rate=0.5)
    assert told(point) == "1,234 lookups/s, hit rate 50.0 %"
    assert told(NOTHING._replace(at_s=0.0, rows=3.0)) == ""
    assert (
        told(NOTHING._replace(at_s=0.0, step=9.0), eta_s=7_500.0) == "step 9, ETA 2h05m"
    )


@pytest.mark.slow
def test_lines_come_ever_more_rarely_and_curves_too(book, caplog, tmp_path):
    caplog.set_level(logging.INFO)
    progress, now_s = watched(book, tmp_path / "report")
    for second in range(0, 5000, 2):
        now_s[0] = float(second)
        if second % 10 == 0:
            beat(book, "trainer", step=second, samples=second, at_s=float(second))
        progress.look()
    said = [r for r in caplog.records if r.name.endswith("progress")]
    assert 60 < len(said) < 200
    with (tmp_path / "report" / CURVES).open() as file:
        rows = list(csv.DictReader(file))
    assert 1000 < len(rows) < 2500
    assert [*rows[0]] == [*Point._fields]
    assert float(rows[-1]["step"]) == 4990
    assert rows[-1]["loss"] == ""


def test_a_job_that_has_ended_is_not_looked_at(book, tmp_path):
    progress, now_s = watched(book, tmp_path)
    beat(book, "trainer", step=4, at_s=1.0)
    now_s[0] = 1.0
    book.fail("trainer 0", "out of memory")
    progress.look()
    assert not progress.points
    assert not (tmp_path / CURVES).exists()


def test_a_folder_that_cannot_be_written_to_is_one_warning(book, caplog, tmp_path):
    (tmp_path / "file").write_text("")
    progress, now_s = watched(book, tmp_path / "file")
    beat(book, "trainer", step=4, at_s=1.0)
    for now_s[0] in (1.0, 2.0):
        progress.look()
    warned = [m for m in caplog.messages if "curves of the job are not kept" in m]
    assert len(warned) == 1


def written(folder, num=20):
    """Write curves, as a coordinator does; return the folder."""
    rows = [
        (1.8e9 + second, 10 * second, 512, 1 / (1 + second), *[""] * 7, second)
        for second in range(num)
    ]
    with (folder / CURVES).open("w", newline="") as file:
        csv.writer(file).writerows([Point._fields, *rows])
    return folder


def test_a_job_that_runs_writes_events_of_tensorboard(book, tmp_path):
    pytest.importorskip("tensorboard", reason="needs the extra report")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    progress, now_s = watched(book, tmp_path)
    for step in (10, 20, 30):
        now_s[0] += 1.0
        beat(book, "trainer", step=step, loss=1 / step, samples=step, at_s=now_s[0])
        beat(book, "server", rows=7, at_s=now_s[0])
        progress.look()
    events = EventAccumulator(str(tmp_path / EVENTS))
    events.Reload()
    assert {*events.Tags()["scalars"]} >= {
        *("training/samples_a_second", "training/loss", "servers/rows")
    }
    losses = events.Scalars("training/loss")
    assert [one.step for one in losses] == [10, 20, 30]
    assert losses[-1].value == pytest.approx(1 / 30)


@pytest.mark.slow
def test_a_report_has_pictures_and_a_table(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra report")
    record = job_list.JobRecord(
        job_id="seven",
        host="here",
        port=1,
        began="today",
        coordinator=ProcessIdentity(1, "", "", ""),
        folder="/there",
        outcome="finished",
    )
    assert report.write(written(tmp_path), record) == [report.NO_EVENTS]
    (tmp_path / EVENTS).mkdir()
    assert report.write(tmp_path, record) == []
    for picture in ("training", "servers"):
        assert (tmp_path / f"{picture}.png").read_bytes()[:4] == b"\x89PNG"
    table = (tmp_path / "table.md").read_text()
    assert "# Job seven" in table
    assert "| loss | 1 | 0.05 |" in table
    assert "| staleness |" not in table


def test_without_matplotlib_the_report_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda _: None)
    said = " ".join(report.write(written(tmp_path), None))
    assert "pip install 'persia-torchrec[report]'" in said
    assert (tmp_path / "table.md").exists()
    assert not (tmp_path / "training.png").exists()


def test_a_report_without_curves_is_an_error(tmp_path):
    with pytest.raises(DataError, match="needs the curves"):
        report.write(tmp_path, None)
    (tmp_path / CURVES).write_text("at_s,step\nx,1\n")
    with pytest.raises(DataError, match="needs the curves"):
        report.write(tmp_path, None)
    few = report.write(written(tmp_path, 3), None)
    assert few == ["3 points are no curve: the table alone is written"]


def test_the_report_stands_beside_the_logs_or_where_the_environment_says(
    tmp_path, monkeypatch
):
    log = tmp_path / "seven/coordinator/0/combined.log"
    find = "persia_torchrec.job.failures.find_own_log"
    monkeypatch.setattr(find, lambda: str(log))
    assert report.folder_of("seven") == tmp_path / "seven/report"
    for number in ("", "/2"):
        logs = tmp_path / f"seven/logs{number}/coordinator/0/combined.log"
        monkeypatch.setattr(find, lambda logs=logs: str(logs))
        assert report.folder_of("seven") == tmp_path / f"seven/report{number}"
    monkeypatch.setattr(find, lambda: "/var/log/all.log")
    assert report.folder_of("seven") is None
    monkeypatch.setenv("PERSIA_REPORT_DIR", str(tmp_path))
    assert report.folder_of("a/seven") == tmp_path / "a_seven"
