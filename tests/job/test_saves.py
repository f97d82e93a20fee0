"""How the saves of a training went, as the notes of its job have it."""

import pytest

from persia_torchrec.errors import FrameError
from persia_torchrec.job.saves import SAVES, Saves, steps, verdict

TOLD = "coordinator: it was told to end (SIGTERM)"


def test_a_note_comes_back_as_it_was_and_a_job_without_one_saves_nothing():
    saves = Saves(7, 9, 1, "disk full", "request 3")
    assert Saves.of({SAVES: saves.text()}) == saves
    assert Saves.of({}) is None
    with pytest.raises(FrameError, match=SAVES):
        Saves.of({SAVES: "{}"})


def test_steps_behind_the_last_checkpoint_are_lost_where_the_last_save_failed():
    failed = Saves(7, 9, 2, "disk full")
    assert failed.lost("failed", TOLD) == (
        "the last save failed: disk full; steps 8 to 9 are lost"
    )
    assert failed.failed() == "the last 2 saves failed: disk full"
    assert verdict("failed", TOLD, failed) == "failed"
    assert steps(8, 8) == "step 8"


def test_a_job_that_was_told_and_saved_has_stopped():
    saved = Saves(9, 9)
    assert (saved.lost("failed", TOLD), saved.failed()) == ("", "")
    assert verdict("failed", TOLD, saved) == "stopped"
    assert verdict("failed", TOLD, None) == "stopped"
    assert verdict("failed", f"{TOLD}, twice", Saves(7, 9)) == "stopped"
    assert verdict("finished", "", saved) == "finished"


def test_a_job_that_fails_of_itself_has_lost_what_no_checkpoint_has():
    lost = Saves(9, 9).lost("failed", "trainer 0: out of memory")
    assert (
        lost == "no last save: trainer 0: out of memory; steps behind step 9 are lost"
    )
    assert verdict("failed", "trainer 0: out of memory", Saves(9, 9)) == "failed"
