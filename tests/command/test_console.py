"""What the verbs print of a value."""

import pytest

from persia_torchrec.command import console


@pytest.mark.parametrize("name", ["pid", "port", "index", "id", "step"])
def test_what_a_user_types_again_is_shown_whole(name, capsys):
    console.show([{name: 1_234_567}])
    assert "1234567" in capsys.readouterr().out


def test_a_count_is_short(capsys):
    console.show([{"rows": 1_234_567}])
    assert "1.23M" in capsys.readouterr().out
