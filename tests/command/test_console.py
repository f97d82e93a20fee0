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


@pytest.mark.parametrize("text", ["[/data/a, /data/b]", "[red]x[/red]", ":warning:"])
def test_text_of_others_is_printed_as_it_is(text, capsys):
    console.console().print(f"files {text} must be there")
    console.show([{text: text}], title=text)
    console.show_pairs({text: text})
    assert capsys.readouterr().out.count(text) == 6
