"""Lengths of time as people write them."""

from __future__ import annotations

import pytest

from commwatch_agent.model.durations import parse_age, parse_last


def test_ages() -> None:
    """An age is a number with a unit; a separate word stands for the whole job."""
    assert [parse_age(text) for text in ("90s", "1.5m", "2h", "7d")] == [90, 90, 7200, 604_800]
    assert (parse_last("5m"), parse_last("all")) == (300, None)


@pytest.mark.parametrize("text", ["", "5", "0s", "m", "-5m", "5 m", "1e3s", "soon"])
def test_no_age(text: str) -> None:
    """What is no age is refused with an example of one."""
    with pytest.raises(ValueError, match="give an age such as 90s"):
        parse_last(text)
