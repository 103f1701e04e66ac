"""Active and past alerts on disk: whole or not at all, bounded, and never in the way."""

from __future__ import annotations

import json
import logging
import math
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commwatch_alerts.book import MOST_PAST, PAST_S, REFRESH_S, Book, Kept, as_json, from_json, with_past
from commwatch_alerts.model import FIRING, PENDING, RESOLVED, Alert

NOTHING: dict[str, Any] = {"seen_at": None, "active": []}
LABELS, TEXTS = {"alertname": "High", "rank": "0"}, {"summary": "é\n"}
OVER = Alert("High", LABELS, TEXTS, 0.5, RESOLVED, active_at=1000.0, fired_at=1060.0, resolved_at=2000.0)


def active(state: str = FIRING, held_s: float = 5.0, value: float = 0.5) -> dict[str, Any]:
    """The state of an evaluator with one alert."""
    alert = replace(OVER, state=state, resolved_at=None, value=value)
    return {"seen_at": 1100.0, "active": [{"alert": as_json(alert), "held_s": held_s, "ended_s": None}]}


@pytest.mark.parametrize("value", [0.1, -1e300, math.inf, -math.inf, math.nan])
def test_round_trip(tmp_path: Path, value: float) -> None:
    """What is read is what was written, whatever the value, and other readers of JSON understand it as well."""
    book, kept = Book(tmp_path / "alerts.json"), Kept(active(value=value), (replace(OVER, value=value),))
    assert book.load() is None
    book.save(kept, 0)
    text = (tmp_path / "alerts.json").read_text()
    json.loads(text, parse_constant=pytest.fail)
    found = Book(tmp_path / "alerts.json").load()
    assert found is not None
    assert repr(found) == repr(kept)
    assert repr(from_json(json.loads(text)["past"][0]).value) == repr(value)


def test_only_its_user_reads_it(tmp_path: Path) -> None:
    """The file is for its user alone, whatever the umask, and nothing else is left beside it."""
    before = os.umask(0)
    try:
        Book(tmp_path / "alerts.json").save(Kept(active()), 0)
    finally:
        os.umask(before)
    assert [(file.name, stat.S_IMODE(file.stat().st_mode)) for file in tmp_path.iterdir()] == [("alerts.json", 0o600)]


def test_written_when_something_has_changed(tmp_path: Path) -> None:
    """A change is written at once, how long alerts have been active once a minute and at the end, and nothing else."""
    path = tmp_path / "alerts.json"
    book = Book(path)

    def writes(kept: Kept, at_s: float, *, last: bool = False) -> bool:
        path.unlink(missing_ok=True)
        book.save(kept, at_s, last=last)
        return path.exists()

    assert not writes(Kept(NOTHING), 0)
    assert writes(Kept(active(PENDING)), 15)
    assert not writes(Kept(active(PENDING, held_s=20, value=0.7)), 30)
    assert writes(Kept(active(FIRING)), 45)
    assert not writes(Kept(active(FIRING, held_s=65)), 44 + REFRESH_S)
    assert writes(Kept(active(FIRING, held_s=66)), 45 + REFRESH_S)
    assert writes(Kept(active(FIRING, held_s=67)), 46 + REFRESH_S, last=True)
    assert writes(Kept(NOTHING, (OVER,)), 200)
    assert not writes(Kept(NOTHING, (OVER,)), 9000)
    assert not writes(Kept(NOTHING, (OVER,)), 9001, last=True)


def test_past_is_bounded() -> None:
    """The newest thousand of the last thirty days are kept, newest first."""
    day = 86400.0
    past = with_past((), [replace(OVER, resolved_at=n * day) for n in range(40)], 40 * day)
    assert [alert.resolved_at for alert in past] == [n * day for n in range(39, 10, -1)]
    assert 30 * day == PAST_S
    many = [replace(OVER, resolved_at=40 * day + n) for n in range(MOST_PAST)]
    assert with_past(past, many, 41 * day) == tuple(reversed(many))


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"version": 1}',
        b'{"version": 2, "evaluator": {"seen_at": null, "active": []}, "past": []}',
        b'{"version": 1, "evaluator": {"seen_at": null, "active": [7]}, "past": []}',
        b'{"version": 1, "evaluator": {"seen_at": "x", "active": []}, "past": []}',
        b'{"version": 1, "evaluator": {"seen_at": null, "active": []}, "past": [{"name": "High"}]}',
        b'{"version": 1, "evaluator": {"active": []}, "past": []}',
        (
            b'{"version": 1, "past": [], "evaluator": {"seen_at": null, "active": [{"held_s": "5", "ended_s": null, "alert": {"name": "High",'
            b'"labels": {}, "annotations": {}, "value": "1", "state": "firing", "active_at": 1, "fired_at": 1, "resolved_at": null}}]}}'
        ),
        b"[" * 100_000,
    ],
)
def test_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes) -> None:
    """A damaged file is put aside as it is, which is said once, and the next one is written in its place."""
    path = tmp_path / "alerts.json"
    path.write_bytes(damage)
    book = Book(path)
    with caplog.at_level(logging.ERROR, "commwatch"):
        assert book.load() is None
    assert (tmp_path / "alerts.json.damaged").read_bytes() == damage
    assert len(caplog.records) == 1
    assert str(path) in caplog.text
    book.save(Kept(active()), 0)
    assert Book(path).load() is not None


@pytest.mark.parametrize("cut", range(0, 900, 37))
def test_cut_short(tmp_path: Path, cut: int) -> None:
    """A file that ends too soon is damaged, wherever it ends; a whole one never is."""
    path = tmp_path / "alerts.json"
    Book(path).save(Kept(active(), (OVER,)), 0)
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    assert (Book(path).load() is None) == (cut < len(whole))


def test_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where the file cannot be written that is said once, raises nothing, and is tried again until it works."""
    book = Book(tmp_path / "no" / "alerts.json")
    with caplog.at_level(logging.ERROR, "commwatch"):
        for at_s in (0, 15, 30):
            book.save(Kept(active()), at_s)
    assert [record.getMessage().startswith("alerts: cannot write") for record in caplog.records] == [True]
    (tmp_path / "no").mkdir()
    book.save(Kept(active()), 45)
    assert Book(tmp_path / "no" / "alerts.json").load() is not None
