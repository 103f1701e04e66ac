"""Valid and invalid values of the probe's variables."""

from __future__ import annotations

import pytest

from commwatch.wire.ring import MARGIN
from commwatch.wire.variables import slots, wrong


@pytest.mark.parametrize(
    ("said", "held"),
    [("128", 128), ("999999999", 999_999_999), ("", None), ("127", None), ("1000000000", None), ("9" * 5000, None), ("1e3", None), ("-128", None)],
)  # fmt: skip
def test_slots(said: str, held: int | None) -> None:
    """A ring holds what its readers need at least, and what can be held at most; a number too long to be read is none."""
    assert slots(said) == held
    assert held is None or held >= 2 * MARGIN


def test_all_wrong_at_once() -> None:
    """Each wrong variable has its line, with its valid values, whatever characters are in it; an empty one is not set."""
    names = (
        *(
            "COMMWATCH",
            "COMMWATCH_BUDGET",
            "COMMWATCH_DISABLE",
            "COMMWATCH_HOOK",
            "COMMWATCH_JOB_OUTPUT",
            "COMMWATCH_NCCL_PLUGIN",
        ),
        *("COMMWATCH_SLOTS", "COMMWATCH_TIMING"),
    )
    assert wrong(dict.fromkeys(names, "")) == []
    assert wrong({"COMMWATCH_JOB": "any"}) == []
    for value in ("nonsense", "\x1b[31m\nx", "nan", "٣٣٣x"):
        said = wrong(dict.fromkeys(names, value))
        assert [line.partition(": needs ")[0] for line in said] == list(names)
        assert all(line.isprintable() for line in said)
