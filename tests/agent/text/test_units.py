"""Numbers in texts: one place formats them, and rounds in one way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commwatch_agent.analysis.headline import split
from commwatch_agent.text.units import IN_TEXTS, percent, rank_time, rate, seconds, short, size

AGENT = Path(__file__).parents[3] / "agent" / "commwatch_agent"
#: A number with a fixed format, and a unit after it.
OF_ITS_OWN = re.compile(r"\{[^{}]*:\.\d[fg%]\} ?(%|s\\b|ms\\b|µs)|:\.\d%\}")
#: What formats the texts of report, ``top``, page, ``diagnose``, ``compare`` and notifications.
ROOMS = ("core", "ingest", "analysis", "nodes", "incidents", "whatif", "report", "comparison", "alerting", "server")
COMMANDS = ("top", "diagnos")


def test_one_place() -> None:
    """No room that makes texts about jobs formats a duration or a share itself, and notifications have the same formats."""
    files = [file for room in ROOMS for file in sorted((AGENT / room).rglob("*.py"))]
    files += [file for name in COMMANDS for file in sorted((AGENT / "commands").glob(f"{name}*.py"))]
    found = {
        file.name: OF_ITS_OWN.findall(file.read_text(encoding="utf-8")) for file in files if file.name != "units.py"
    }
    assert len(found) > 100
    assert {name: texts for name, texts in found.items() if texts} == {}
    assert (IN_TEXTS["percent"], IN_TEXTS["seconds"]) == (percent, seconds)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.125, "13%"),
        (0.285, "28%"),
        (0.01, "1%"),
        (0.0096, "1%"),
        (0.0042, "0.4%"),
        (0.00012, "0.01%"),
        (0.0, "0%"),
        (-0.29, "-29%"),
        (-1e-9, "0%"),
    ],
)
def test_shares(value: float, text: str) -> None:
    """Shares are whole percent, halves up; below 1% they have one decimal, below 0.1% two, so that something is not shown as nothing."""
    assert percent(value) == text


def test_other_numbers() -> None:
    """Three significant digits, halves up; a duration has the unit that fits."""
    assert [short(value) for value in (0, 1.125, 99.94, 1023.4)] == ["0", "1.13", "99.9", "1023"]
    assert [seconds(value) for value in (0, 1.25e-5, 0.0125, 1.005, 12.25, 119.4, 120, 3661)] == [
        "0 s", "12.5 µs", "12.5 ms", "1.00 s", "12.3 s", "119 s", "2m00s", "1h01m",
    ]  # fmt: skip
    assert (rate(0), rate(2.26e7)) == ("0 B/s", "22.6 MB/s")


def test_units_after_rounding() -> None:
    """The unit fits the rounded number: nothing is 1000 ms, 1000 MB/s, 1024 KiB, 60 s after the minutes, or 120 s in place of 2 minutes."""
    assert [seconds(value) for value in (0.9994, 0.9996, 0.0009996, 119.6, 179.7, 3599.7, 7199)] == [
        "999 ms", "1.00 s", "1 ms", "2m00s", "3m00s", "1h00m", "2h00m",
    ]  # fmt: skip
    assert [rate(value) for value in (143, 999_400, 999_600, 9.996e8)] == ["143 B/s", "999 kB/s", "1 MB/s", "1 GB/s"]
    assert [size(value) for value in (1023, (1 << 20) - 1, (1 << 30) - 1)] == ["1023 B", "1 MiB", "1 GiB"]
    assert [rank_time(hours) for hours in (0.25, 0.99999, 1, 1422.19)] == [
        "15m00s", "1h00m", "1.0 hours", "1,422.2 hours",
    ]  # fmt: skip


def test_parts_add_up() -> None:
    """The rounded parts of a share add up to the rounded share."""
    assert split(0.405, 0.125, None) == "28% transfer, 13% waiting for late ranks"
    assert percent(0.405) == "41%"
