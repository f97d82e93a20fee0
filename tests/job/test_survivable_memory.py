import contextlib
import os
import re

import pytest

from persia_torchrec.job.survivable_memory import AUTO, TwoHalves, open_memory


def test_memory_has_huge_pages_where_the_system_gives_any(caplog):
    caplog.set_level("INFO")
    os.close(open_memory(AUTO))
    assert re.search(
        r": (huge pages, of a (memfd|tmpfs that only this job sees)|small pages: )",
        caplog.text,
    )


@pytest.mark.parametrize("num_writes", range(6))
def test_a_value_is_the_previous_or_the_new_one_when_its_writer_is_killed(
    num_writes, monkeypatch
):
    memory, write = os.memfd_create("halves"), os.pwrite
    halves = TwoHalves(memory)
    values = [b"", b"first", b"second" * 1000, b"third" * 2000]
    for value in values[:3]:
        halves.write(value)
    done = []

    def write_some(file, data, place):
        if len(done) == num_writes:
            raise InterruptedError
        done.append(place)
        return write(file, data[:4096], place)

    monkeypatch.setattr(os, "pwrite", write_some)
    with contextlib.suppress(InterruptedError):
        halves.write(values[3])
    found = TwoHalves(memory).read()
    assert found == values[3 if num_writes > 3 else 2]
    halves.close()
    os.close(memory)
