"""What the terminal shows of the logs of a job."""

import io

import pytest

from persia_torchrec.launch.job_output import Console


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(*lines, target=None):
    """Return what a console shows of lines."""
    target = io.StringIO() if target is None else target
    console = Console(target)
    for line in lines:
        assert console.write(f"{line}\n") == len(line) + 1
        console.write("")
    console.close()
    return target.getvalue().splitlines()


def record(who, level, name, text, job=" [seven]"):
    return f"{who} 2026-11-27 10:25:54,700 {level} {name}{job}: {text}"


def test_a_record_is_shown_by_its_process_time_and_text():
    joined = record("server/1", "INFO", "persia_torchrec.job.member", "server 1 joined")
    assert shown(joined) == ["server/1 10:25:54 server 1 joined"]
    warned = record("trainer/0", "WARNING", "persia_torchrec.env", "odd", job="")
    assert shown(warned) == ["trainer/0 10:25:54 WARNING odd"]


def test_details_are_for_the_log_with_all_of_their_lines():
    tables = record("server/0", "INFO", "persia_torchrec.server.handlers", "new tables")
    joined = record("server/0", "INFO", "persia_torchrec.job.member", "server 0 joined")
    lines = [tables, "server/0 tables  dim", "server/0 1       16", joined]
    assert shown(*lines) == ["server/0 10:25:54 server 0 joined"]
    warned = tables.replace(" INFO ", " WARNING ")
    assert len(shown(warned, "server/0 more")) == 2


def test_lines_of_a_script_and_tracebacks_are_shown_as_they_are():
    lines = [
        "trainer/0 step 500: loss 0.3954",
        "trainer/0 Traceback (most recent call last):",
        '  File "train.py", line 3, in <module>'.join(["trainer/0 ", ""]),
        "loader/0 UserWarning: mine",
        "trainer/0 /home/me/train.py:7: UserWarning: mine",
        "predictor/0 ready http://127.0.0.1:8080",
    ]
    assert shown(*lines) == lines


@pytest.mark.parametrize(
    "line",
    [
        "WARNING:torchrec.distributed.planner.types:The topology was constructed",
        "/v/lib/python3.11/site-packages/torchrec/d/p.py:552: FutureWarning: is known",
        "/v/lib/python3.11/site-packages/torch/nn/m.py:3: UserWarning: is deprecated",
        "[rank0]:W1127 10:26:50.840000 15277 torch/fx/_trace.py:56] is_fx_tracing",
        "W1127 10:26:50.840000 15277 torch/distributed/run.py:766] Setting OMP",
    ],
)
def test_warnings_of_frameworks_about_themselves_are_left_out(line):
    code = ["trainer/0   DistributedDataParallel("] if "Warning: " in line else []
    assert shown(f"trainer/0 {line}", *code, "trainer/0 mine") == ["trainer/0 mine"]


def test_the_line_of_progress_is_the_last_of_a_terminal():
    at_30 = record("coordinator/0", "INFO", "persia_torchrec.job.progress", "step 30")
    assert shown(at_30) == ["coordinator/0 10:25:54 step 30"]
    target = Terminal()
    at_40 = at_30.replace("step 30", "step 40")
    saved = record("trainer/0", "INFO", "persia_torchrec.training.recovery", "saved")
    failed = record("trainer/0", "ERROR", "persia_torchrec.job.script", "failed")
    shown(at_30, at_40, saved, failed, target=target)
    text = target.getvalue()
    clear = "\r\x1b[K"
    assert text == (
        f"{clear}10:25:54 step 30{clear}10:25:54 step 40"
        f"{clear}trainer/0 10:25:54 saved\n10:25:54 step 40"
        f"{clear}trainer/0 \x1b[31m10:25:54 ERROR failed\x1b[0m\n10:25:54 step 40\n"
    )


def test_colours_of_torchx_and_of_records_are_understood():
    line = record("x", "WARNING", "persia_torchrec.env", "odd").removeprefix("x ")
    coloured = f"\x1b[32mtrainer/0\x1b[0m \x1b[33m{line}\x1b[0m"
    assert shown(coloured)[0].endswith("10:25:54 WARNING odd")
