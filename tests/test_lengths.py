"""The order of the modules of tests."""

from __future__ import annotations

import json

from tests.lengths import RECORDED, TREE, UNKNOWN_S, places


def test_order() -> None:
    """In each kind longer modules come first, and each begins when as large a part of its kind's time is over."""
    lengths = {"job60": 60.0, "job30": 30.0, "job10": 10.0, "one2": 2.0, "one1": 1.0, "one0": 0.0, "two1": 1.0}
    place = places({module: module[:3] for module in reversed(lengths)}, lengths)
    assert place == {"job60": 0, "job30": 0.6, "job10": 0.9, "one2": 0, "one1": 2 / 3, "one0": 1, "two1": 0}


def test_unknown_module() -> None:
    """A module without a length counts as one of some seconds, and comes before shorter ones."""
    place = places(dict.fromkeys(("new", "long", "short"), "unit"), {"long": 2 * UNKNOWN_S, "short": UNKNOWN_S / 2})
    assert sorted(place, key=lambda name: place[name]) == ["long", "new", "short"]


def test_recorded() -> None:
    """The recorded lengths are of modules that exist."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert recorded
    assert [module for module in recorded if not (TREE / module).is_file()] == []
