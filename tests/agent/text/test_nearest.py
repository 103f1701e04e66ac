"""Suggestions for misspelt names."""

from __future__ import annotations

import pytest

from commwatch_agent.text.nearest import nearest

FLAGS = ["--ca-file", "--config", "--job", "--json", "--port", "--ranks", "--replicate", "-h"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--prot", "--port"),
        ("--jbo", "--job"),
        ("--rank", "--ranks"),
        ("--eplicate", "--replicate"),
        ("--confg", "--config"),
        ("--scale", ""),
        ("--cone", ""),
        ("--x", ""),
        ("-x", ""),
        ("--", ""),
    ],
)
def test_flag(given: str, meant: str) -> None:
    """A flag with a slip is recognised; one of which only some letters are elsewhere is not, and dashes do not count."""
    assert nearest(given, FLAGS, "--") == meant


def test_variable() -> None:
    """The prefix that all names have makes none of them alike."""
    known = ["COMMWATCH_PORT", "COMMWATCH_CA_FILE"]
    assert nearest("COMMWATCH_PROT", known, "COMMWATCH_") == "COMMWATCH_PORT"
    assert nearest("COMMWATCH_SCALE", known, "COMMWATCH_") == ""


def test_word() -> None:
    """Without a prefix, all of a word counts; among no names there is none."""
    assert nearest("reprot", ["report", "run"]) == "report"
    assert nearest("eport", ["report", "run"]) == "report"
    assert nearest("nosuch", ["report", "run"]) == nearest("run", []) == ""
