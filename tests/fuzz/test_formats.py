"""Formats: any input is accepted, or is an error of ours that says what is wrong."""

import pytest

from tests.fuzz.conftest import LEAST_OF_A_ROW
from tests.fuzz.formats import FORMATS as FILE_FORMATS
from tests.fuzz.running import CASES, is_accepted, run
from tests.fuzz.serving_formats import SERVING_FORMATS
from tests.fuzz.training_formats import TRAINING_FORMATS

pytestmark = pytest.mark.slow

FORMATS = FILE_FORMATS | SERVING_FORMATS | TRAINING_FORMATS
KEPT = sorted(path for path in CASES.glob("*/*") if path.parent.name in FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_no_input_breaks_what_reads_it(
    name, processes, in_memory, num_inputs, fuzz_seed, record_property
):
    found = run(processes, in_memory, name, FORMATS[name], num_inputs, fuzz_seed)
    assert found.inputs == num_inputs
    assert num_inputs < LEAST_OF_A_ROW or 0 < found.accepted < num_inputs
    if num_inputs >= LEAST_OF_A_ROW:
        measured = (
            f"slowest {found.slowest_ms:.0f} ms, {found.processor_ms:.0f} of processor "
            f"time, peak {found.peak_mib:.0f} MiB, grown {found.grown_mib:.1f} MiB"
        )
        rate = f"{found.inputs / found.seconds:.0f}"
        row = name, found.inputs, found.accepted, rate, measured, fuzz_seed
        record_property("row", row)


@pytest.mark.parametrize(
    "path", KEPT, ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_inputs_of_earlier_defects_pass(path, in_memory, monkeypatch):
    monkeypatch.chdir(in_memory)
    is_accepted(FORMATS[path.parent.name](), path.read_bytes())
