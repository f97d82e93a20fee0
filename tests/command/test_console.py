"""What the verbs print of a value."""

import pytest

from persia_torchrec.command import console

BAD = "a\x1b[31mred\x1b]0;title\x07\x9b1A\r"
SHOWN = r"a\x1b[31mred\x1b]0;title\x07\x9b1A\r"


def test_names_of_others_move_and_colour_nothing(capsys):
    console.show([{"name": BAD}], title=BAD)
    console.show_pairs({"path": BAD})
    console.echo(f"in {BAD}")
    console.echo(f"in {BAD}", err=True)
    out, err = capsys.readouterr()
    assert out.count(SHOWN) == 4
    assert err == f"in {SHOWN}\n"
    assert not set("\x1b\x07\x9b\r") & set(out + err)


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
