"""The table of collectors, and that one failing does not fail the rest."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from commwatch_agent.prometheus.metrics import METRICS
from commwatch_collectors.registry import COLLECTORS, Collectors, Reading

MODULE = """
from commwatch_collectors.registry import Reading

class Fine:
    def collect(self):
        return [Reading("network_bytes_total", ("eth0", "receive"), 1.0)]

class Broken:
    failing, error = True, {error}
    def collect(self):
        if Broken.failing:
            raise self.error
        return []
"""


@pytest.mark.parametrize("name", COLLECTORS)
def test_every_collector(name: str) -> None:
    """Every entry of the table can be imported and built without arguments, and reads what is in ``METRICS``."""
    ((told, readings),) = Collectors([name]).collect()
    assert told == name
    for reading in readings or []:
        assert len(reading.labels) == len(METRICS[reading.metric].labels)


@pytest.mark.parametrize("error", ['OSError("no such device")', 'ValueError("no such device")'])
def test_one_fails(
    tmp_path: Path, error: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A collector that fails has no readings, the others have theirs; it is said once each time it begins to fail."""
    module = f"collectors_{abs(hash(error))}"
    (tmp_path / f"{module}.py").write_text(MODULE.format(error=error))
    monkeypatch.syspath_prepend(tmp_path)
    for name, cls in (("first", "Fine"), ("broken", "Broken"), ("last", "Fine")):
        monkeypatch.setitem(COLLECTORS, name, f"{module}:{cls}")
    collectors = Collectors(["first", "broken", "last"])
    broken = __import__(module).Broken
    fine = [Reading("network_bytes_total", ("eth0", "receive"), 1.0)]
    with caplog.at_level(logging.WARNING, "commwatch"):
        for failing, lines in ((True, 1), (True, 1), (False, 1), (False, 1), (True, 2), (True, 2)):
            broken.failing = failing
            assert collectors.collect() == [("first", fine), ("broken", None if failing else []), ("last", fine)]
            assert len(caplog.records) == lines
    for record in caplog.records:
        assert "broken" in record.getMessage()
        assert "no such device" in record.getMessage()


def test_only_those_asked_for() -> None:
    """Collectors are built only where they are asked for."""
    assert Collectors([]).collect() == []
    assert [name for name, _ in Collectors().collect()] == list(COLLECTORS)
