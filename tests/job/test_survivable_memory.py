import os
import re

from persia_torchrec.job.survivable_memory import AUTO, open_memory


def test_memory_has_huge_pages_where_the_system_gives_any(caplog):
    caplog.set_level("INFO")
    os.close(open_memory(AUTO))
    assert re.search(
        r"is in (huge pages, of a (memfd|tmpfs that only this job sees)|small pages: )",
        caplog.text,
    )
