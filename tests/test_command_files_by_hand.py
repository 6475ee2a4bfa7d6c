"""What the name of a file says to a command, and what is said of options that are no values."""

from __future__ import annotations

from argparse import Namespace

import pytest

from flopmeter.cli import main
from flopmeter.cli.command import settle_format
from flopmeter.cli.explain import explain

ALL = ("text", "json", "csv", "markdown", "html")


def settled(output, format=None, formats=ALL, **others) -> str:
    options = Namespace(output=output, format=format, formats=formats, **others)
    settle_format(options)
    return options.format


@pytest.mark.parametrize(
    ("name", "format"),
    [("a.json", "json"), ("a.csv", "csv"), ("a.md", "markdown"), ("a.txt", "text"), ("a.html", "html")],
)
def test_the_ending_of_a_file_says_its_format(name, format):
    assert settled(name) == settled(name, format) == format
    other = "json" if format != "json" else "text"
    with pytest.raises(ValueError, match=f"--format {other} contradicts the ending of {name}"):
        settled(name, other)
    with pytest.raises(ValueError, match=f"this command has no {format}; it has {other}$"):
        settled(name, formats=(other,))


def test_a_file_of_another_ending_has_the_format_that_is_asked_for():
    assert settled("a.log", "csv") == settled("a", "csv") == settled(None, "csv") == "csv"
    assert settled("a") == settled(None) == "text"


@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize("name", ["a.png", "a.log"])
def test_who_names_a_picture_is_told_of_plot_where_the_command_draws(name, draws):
    with pytest.raises(ValueError, match="says no format: end it in ") as told:
        settled(name, **({"plot": None} if draws else {}))
    assert ("--plot draws pictures" in str(told.value)) == (draws and name == "a.png")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--routing often", "expected balanced, independent or a number from 1 to 2, not 'often'"),
        ("--optimizer nothing", "nothing"),
    ],
)
def test_a_word_that_is_no_value_is_told_with_those_that_are(option, said, capsys):
    assert main(["table", "encoder-layer", *option.split()]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "invalid" not in error  # argparse's own words, which say nothing


def test_an_op_that_launches_kernels_is_not_said_to_launch_none():
    """A product reads two matrices of 256 x 256 in 16 bits, and writes one."""
    lines = explain("mm").splitlines()
    assert any(line.split() == ["bytes", "262,144", "read,", "131,072", "written;", "85.3", "FLOP/B"] for line in lines)
    assert not any("launches nothing" in line for line in lines)
