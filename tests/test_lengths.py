"""The order of the modules of tests."""

from __future__ import annotations

import json

from tests.lengths import RECORDED, TREE, UNKNOWN_S, places


def test_order() -> None:
    """In each kind longer modules come first, and each begins when as large a part of its kind's time is over."""
    lengths = {"job60": 60.0, "job30": 30.0, "job10": 10.0, "unit2": 2.0, "unit1": 1.0, "unit0": 0.0}
    place = places({module: module.startswith("job") for module in reversed(lengths)}, lengths)
    assert place == {"job60": 0, "job30": 0.6, "job10": 0.9, "unit2": 0, "unit1": 2 / 3, "unit0": 1}


def test_unknown_module() -> None:
    """A module without a length counts as one of some seconds, and comes before shorter ones."""
    place = places({"new": False, "long": False, "short": False}, {"long": 2 * UNKNOWN_S, "short": UNKNOWN_S / 2})
    assert sorted(place, key=lambda name: place[name]) == ["long", "new", "short"]


def test_recorded() -> None:
    """The recorded lengths are of modules that exist."""
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert recorded
    assert [module for module in recorded if not (TREE / module).is_file()] == []
