"""Files that outlive the agent: whole or not at all, and never in the way; and alerts as JSON."""

from __future__ import annotations

import json
import logging
import math
import os
import stat
from pathlib import Path

import pytest

from commwatch_alerts.alert_json import as_json, from_json
from commwatch_alerts.kept import KeptFile
from commwatch_alerts.model import RESOLVED, Alert

OVER = Alert(
    "High",
    {"alertname": "High"},
    {"summary": "é\n"},
    0.5,
    RESOLVED,
    active_at=1000.0,
    fired_at=1060.0,
    resolved_at=2000.0,
)


def refuse(text: str) -> str:
    raise ValueError("damaged")


@pytest.mark.parametrize("value", [0.1, -1e300, math.inf, -math.inf, math.nan])
def test_alert_round_trip(value: float) -> None:
    """What is read is what was written, whatever the value, and other readers of JSON understand it as well."""
    alert = Alert("High", OVER.labels, OVER.annotations, value, RESOLVED, active_at=1.0, fired_at=2.0, resolved_at=3.0)
    text = json.dumps(as_json(alert), allow_nan=False)
    assert repr(from_json(json.loads(text, parse_constant=pytest.fail))) == repr(alert)


@pytest.mark.parametrize(("key", "value"), [("state", "loud"), ("active_at", "soon"), ("value", "much"), ("labels", 1)])
def test_no_alert(key: str, value: object) -> None:
    """JSON that is no alert is refused."""
    with pytest.raises((ValueError, TypeError, AttributeError)):
        from_json({**as_json(OVER), key: value})


def test_only_its_user_reads_it(tmp_path: Path) -> None:
    """A file is for its user alone, whatever the umask, and nothing else is left beside it."""
    before = os.umask(0)
    try:
        assert KeptFile(tmp_path / "told.json").save("text")
    finally:
        os.umask(before)
    assert [(file.name, stat.S_IMODE(file.stat().st_mode)) for file in tmp_path.iterdir()] == [("told.json", 0o600)]
    assert KeptFile(tmp_path / "told.json").load(str) == "text"


def test_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged file is renamed, with one line, and a new one starts."""
    (tmp_path / "told.json").write_text("{")
    kept = KeptFile(tmp_path / "told.json")
    with caplog.at_level(logging.ERROR, "commwatch"):
        assert kept.load(refuse) is None
    assert [file.name for file in tmp_path.iterdir()] == ["told.json.damaged"]
    assert "it was renamed to" in caplog.text
    assert kept.load(refuse) is None


def test_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A place that cannot be written is logged once, and again after it worked."""
    kept = KeptFile(tmp_path / "away" / "told.json")
    with caplog.at_level(logging.ERROR, "commwatch"):
        assert [kept.save("one"), kept.save("two")] == [False, False]
        assert len(caplog.records) == 1
        (tmp_path / "away").mkdir()
        assert kept.save("three")
        (tmp_path / "away" / "told.json").unlink()
        (tmp_path / "away").rmdir()
        assert not kept.save("four")
    assert len(caplog.records) == 2
