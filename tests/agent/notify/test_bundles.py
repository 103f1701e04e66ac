"""Evidence of alerts: what is in a bundle, which alerts share one, how many are kept, and what happens where none can be."""

from __future__ import annotations

import json
import logging
import math
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commwatch_agent.analysis.queries import QueryService
from commwatch_agent.history.opening import StoreError
from commwatch_agent.notify.bundles import MOST_BYTES, MOST_KEPT, Bundles, Sections, Sources, bundle
from commwatch_alerts.model import RESOLVED, Alert
from tests.helpers import needs, small_tmpfs
from tests.receivers import NOON, alert

URL = "http://agent:9477"


def fired(name: str = "CommShareHigh", at: float = NOON, **labels: str) -> Alert:
    """An alert that fired just then."""
    return replace(alert(name, at=at, **labels), fired_at=at)


class Scene:
    """Evidence of an agent under a clock of the test, whose bundles have one section."""

    def __init__(self, directory: Path, at: float = NOON) -> None:
        self.now = at
        self.asked: list[str | None] = []
        #: Raised by the next attempts.
        self.errors: list[Exception] = []
        self.directory = directory
        self.evidence = Bundles(directory, URL, self._sections, lambda: self.now)

    def _sections(self, job: str | None) -> Sections:
        self.asked.append(job)
        if self.errors:
            raise self.errors.pop()
        return {"ranks": lambda: [0, 1]}

    def evaluate(self, *alerts: Alert) -> list[str | None]:
        """Evaluate a round in which these alerts fire; return the links that are sent. Bundles are taken after it."""
        self.evidence.want(alerts)
        links = [one.annotations.get("evidence_url") for one in self.evidence.linked(alerts)]
        self.evidence.tick()
        return links

    def kept(self) -> list[Path]:
        """Bundles on disk."""
        return sorted(self.directory.glob("*.json"))


def raising(error: Exception) -> Callable[[], object]:
    """A section that cannot be had."""

    def section() -> object:
        raise error

    return section


# -- a bundle ---------------------------------------------------------------------------------


def test_sections_in_order() -> None:
    """A bundle has the alert, then its sections in the order in which they were given, then what was left out: nothing."""
    text = bundle(fired(), {"ranks": lambda: [fired()], "steps": lambda: {"a": 1}}, NOON + 1)
    found = json.loads(text)
    assert list(found) == ["alert", "id", "taken_at", "ranks", "steps", "left_out"]
    assert (found["id"], found["taken_at"], found["alert"]["name"]) == (fired().id, NOON + 1, "CommShareHigh")
    assert (found["ranks"][0]["fired_at"], found["steps"], found["left_out"]) == (NOON, {"a": 1}, {})


@pytest.mark.parametrize("error", [OSError("no such device"), ValueError("odd"), StoreError("history is damaged")])
def test_section_that_cannot_be_had(error: Exception) -> None:
    """A section that raises is left out by name and reason, and the others are there."""
    found = json.loads(bundle(fired(), {"gpus": raising(error), "host": lambda: 1}, NOON))
    assert (found["left_out"], found["host"], "gpus" in found) == ({"gpus": str(error)}, 1, False)


def test_size() -> None:
    """A section that has no room is left out, and a later one that has is not; what is not left out fits."""
    sections = {"large": lambda: "x" * 5000, "small": lambda: "y" * 500, "next": lambda: "z" * 500}
    text = bundle(fired(), sections, NOON, most_bytes=len(bundle(fired(), {}, NOON)) + 600)
    found = json.loads(text)
    assert list(found["left_out"]) == ["large", "next"]
    assert "too large: 5002 bytes" in found["left_out"]["large"]
    assert found["small"] == "y" * 500
    assert len(json.loads(bundle(fired(), sections, NOON))["large"]) == 5000


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_finite_number(value: float) -> None:
    """A value that is no finite number is null, for JSON has no such; a section with one is left out."""

    def refuse(constant: str) -> object:
        raise AssertionError(f"no JSON: {constant}")

    text = bundle(replace(fired(), value=value), {"odd": lambda: value, "host": lambda: 1}, NOON)
    found = json.loads(text, parse_constant=refuse)
    assert (found["alert"]["value"], list(found["left_out"]), found["host"]) == (None, ["odd"], 1)


def test_history_that_cannot_be_read(tmp_path: Path) -> None:
    """Where there is no history, what comes from it is left out, and the bundle is taken."""

    class Nothing:
        def __getattr__(self, _: str) -> Callable[..., object]:
            return lambda *_: []

    nothing: Any = Nothing()
    found = json.loads(
        bundle(
            fired(),
            Sources(QueryService(tmp_path / "none"), list, nothing, nothing, nothing).sections("train"),
            NOON,
        )
    )
    assert {"ranks", "operations", "steps", "stacks"} <= set(found["left_out"])
    assert {"verdicts", "nccl_messages", "gpus", "host", "topology"} <= set(found)


# -- which alerts have one --------------------------------------------------------------------


def test_shared(tmp_path: Path) -> None:
    """Alerts of one name and job that fire together share a bundle; those of another job, name or time have their own."""
    scene = Scene(tmp_path)
    together = [fired(rank="1"), fired(rank="2")]
    links = scene.evaluate(*together, fired(job_id="other"), fired("StragglerRank"))
    assert links == [
        f"{URL}/api/v1/alerts/{one.id}/evidence" for one in [*together, fired(job_id="other"), fired("StragglerRank")]
    ]
    assert (len(scene.kept()), scene.asked) == (3, ["train", "other", "train"])
    text = scene.evidence.read(together[0])
    assert text is not None
    assert {scene.evidence.read(one) for one in together} == {text}
    scene.now += 15
    scene.evaluate(*together, fired(at=NOON + 15, rank="3"))
    assert len(scene.kept()) == 4


def test_not_told_again(tmp_path: Path) -> None:
    """What still fires, or has ended, has no second bundle, and keeps the link to the one that it has."""
    scene = Scene(tmp_path)
    first = scene.evaluate(fired())
    for _ in range(5):
        scene.now += 15
        assert scene.evaluate(fired()) == first
    assert scene.evaluate(replace(fired(), state=RESOLVED, resolved_at=scene.now)) == first
    assert len(scene.asked) == 1


def test_restart(tmp_path: Path) -> None:
    """After a restart an alert keeps the link to its bundle; one that has fired for a minute and has none gets none."""
    links = Scene(tmp_path).evaluate(fired())
    scene = Scene(tmp_path, NOON + 61)
    assert scene.evaluate(fired(), fired("StragglerRank")) == [*links, None]
    assert (scene.asked, len(scene.kept())) == ([], 1)


def test_killed_while_it_was_taken(tmp_path: Path) -> None:
    """What an agent that was killed has left half is gone, and no link leads to it; the alert gets its bundle while it is new."""
    scene = Scene(tmp_path)
    scene.evidence.want([fired()])
    assert len(list(tmp_path.iterdir())) == 1
    assert Scene(tmp_path, NOON + 61).evaluate(fired()) == [None]
    assert list(tmp_path.iterdir()) == []
    assert Scene(tmp_path, NOON + 30).evaluate(fired()) != [None]
    assert len(scene.kept()) == 1


# -- how many, for whom -----------------------------------------------------------------------


def test_oldest_go(tmp_path: Path) -> None:
    """So many bundles are kept: the oldest go, with the links to them."""
    scene = Scene(tmp_path)
    alerts = [fired(at=NOON + n) for n in range(MOST_KEPT + 3)]
    for one in alerts:
        scene.now = one.active_at
        scene.evaluate(one)
    assert len(scene.kept()) == MOST_KEPT
    gone = [scene.evidence.read(one) is None for one in alerts]
    assert gone == [True] * 3 + [False] * MOST_KEPT
    linked = ["evidence_url" in one.annotations for one in scene.evidence.linked(alerts)]
    assert linked == [False] * 3 + [True] * MOST_KEPT


def test_a_thousand_at_once(tmp_path: Path) -> None:
    """Of a thousand alerts of as many jobs a few have a bundle, and only those a link; of one job they share it."""
    scene = Scene(tmp_path / "jobs")
    links = [link for link in scene.evaluate(*(fired(job_id=str(n)) for n in range(1000))) if link]
    assert 0 < len(links) == len(scene.kept()) < 20
    scene = Scene(tmp_path / "ranks")
    assert None not in scene.evaluate(*(fired(rank=str(n)) for n in range(1000)))
    assert len(scene.kept()) == 1


def test_private(tmp_path: Path) -> None:
    """Nobody but the agent's user can read a bundle, and a file is no larger than what is in it."""
    scene = Scene(tmp_path / "state" / "evidence")
    scene.evaluate(fired())
    (file,) = scene.directory.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (scene.directory, file)] == [0o700, 0o600]
    assert json.loads(file.read_text())["ranks"] == [0, 1]


# -- where none can be kept -------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A directory on a file system that is too small for a bundle."""
    with small_tmpfs(tmp_path / "small", MOST_BYTES // 2) as mounted:
        needs(mounted, "root, to mount a file system")
        yield tmp_path / "small" / "evidence"


def said_once(scene: Scene, caplog: pytest.LogCaptureFixture) -> str:
    """The log lines of several rounds in which alerts are sent without a link."""
    with caplog.at_level(logging.WARNING, "commwatch"):
        for _ in range(3):
            scene.now += 15
            assert scene.evaluate(fired(), fired(at=scene.now)) == [None, None]
    (record,) = caplog.records
    return record.getMessage()


def test_full_disk(small: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On a full disk alerts are sent without a link, this is logged once, and no file is left behind."""
    scene = Scene(small)
    assert said_once(scene, caplog) == f"alerts: cannot store evidence in {small}: No space left on device"
    assert list(small.iterdir()) == []


def test_directory_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the directory cannot be created, alerts are sent without a link, and this is logged once; once it can, they have one."""
    (tmp_path / "evidence").write_text("a file")
    scene = Scene(tmp_path / "evidence")
    assert said_once(scene, caplog) == f"alerts: cannot store evidence in {tmp_path}/evidence: File exists"
    (tmp_path / "evidence").unlink()
    assert scene.evaluate(fired(at=scene.now)) != [None]
    assert len(scene.kept()) == 1


def test_unexpected_error(tmp_path: Path) -> None:
    """An error of ours in a section costs one bundle; the alert gets no link, and those after it get theirs."""
    scene = Scene(tmp_path)
    first, second = fired(), fired("StragglerRank")
    scene.evidence.want([first, second])
    scene.errors.append(KeyError("ours"))
    with pytest.raises(KeyError):
        scene.evidence.tick()
    scene.evidence.tick()
    assert not list(scene.directory.glob(".*"))
    assert scene.evidence.linked([first]) == [first]
    assert scene.evidence.read(second) is not None


def test_bundle_that_cannot_be_written_after_all(tmp_path: Path) -> None:
    """If the disk fails after an alert was sent, nothing raises, and the link is no longer sent."""
    scene = Scene(tmp_path / "evidence")
    one = fired()
    scene.evidence.want([one])
    (hidden,) = scene.directory.iterdir()
    hidden.unlink()
    scene.now += 61
    scene.evidence.tick()
    assert scene.evidence.linked([one]) == [one]
    assert scene.evidence.read(one) is None
