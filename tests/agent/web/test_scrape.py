"""The page of /metrics: one at a time, held for a moment, in the form that is asked for."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Iterator

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from commwatch_agent.web import scrape
from commwatch_agent.web.scrape import Scrape
from tests.helpers import PATIENCE_S

PROMETHEUS = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.5"


class Looks(Collector):
    """Counts how often it is looked at; a look waits for ``go`` and costs so much of a processor's time."""

    def __init__(self, cost_s: float = 0.0) -> None:
        self.number, self.at_once, self._cost_s = 0, 0, cost_s
        self.go = threading.Event()
        self.go.set()
        self._under_way = 0

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        self._under_way += 1
        self.at_once = max(self.at_once, self._under_way)
        assert self.go.wait(PATIENCE_S)
        self.number += 1
        until_s = time.thread_time() + self._cost_s
        while time.thread_time() < until_s:
            pass
        family = GaugeMetricFamily("looks", "How many there were.")
        family.add_metric([], self.number)
        yield family
        self._under_way -= 1


def _scrape(looks: Looks, now: list[float]) -> Scrape:
    registry = CollectorRegistry()
    registry.register(looks)
    return Scrape(registry, lambda: now[0])


def test_one_at_a_time() -> None:
    """A hundred who ask at once get the same page, and it is rendered once."""

    async def play() -> set[bytes]:
        looks.go.clear()
        asked = [asyncio.create_task(page.page("")) for _ in range(100)]
        await asyncio.sleep(0)
        looks.go.set()
        return {text for text, _ in await asyncio.gather(*asked)}

    looks = Looks()
    page = _scrape(looks, [0.0])
    assert len(asyncio.run(play())) == 1
    assert (looks.number, looks.at_once) == (1, 1)


def test_held() -> None:
    """A page that costs much is held for ten times as long as it took, and for 0.3 s at most; who asks later gets another."""

    async def play() -> list[bytes]:
        texts = []
        for now[0] in (0.0, 0.1, 0.35):
            texts.append((await page.page(""))[0].splitlines()[-1])
        return texts

    now = [0.0]
    page = _scrape(Looks(cost_s=0.06), now)
    assert asyncio.run(play()) == [b"looks 1.0", b"looks 1.0", b"looks 2.0"]


def test_forms() -> None:
    """OpenMetrics for who takes it, as Prometheus does, and text for others, each with its own content type."""

    async def play() -> list[tuple[bytes, str]]:
        return [await page.page(accept) for accept in (PROMETHEUS, "", "text/html,*/*", "application/openmetrics-text")]

    page = _scrape(Looks(), [0.0])
    found = asyncio.run(play())
    assert [text.endswith(b"# EOF\n") for text, _ in found] == [True, False, False, True]
    assert [kind.partition(";")[0] for _, kind in found] == [
        "application/openmetrics-text", "text/plain", "text/plain", "application/openmetrics-text",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("application/openmetrics-text;version=abc", "text/plain"),
        ("application/openmetrics-text;version=1.x,text/plain;version=x", "text/plain"),
        ("application/openmetrics-text;;=,", "application/openmetrics-text"),
        ("text/plain;q=1, application/openmetrics-text;version=1.0.0; q=0", "text/plain"),
        ("application/openmetrics-text;q=0.000;version=1.0.0", "text/plain"),
        ("application/openmetrics-text;version=1.0.0;q=0.5", "application/openmetrics-text"),
    ],
)
def test_odd_wishes(accept: str, kind: str) -> None:
    """A version that is no version gets plain text, and so does a client that refuses OpenMetrics."""
    page = _scrape(Looks(), [0.0])
    assert asyncio.run(page.page(accept))[1].partition(";")[0] == kind


def test_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for a page that does not come is told, and gets it later."""

    async def play() -> None:
        looks.go.clear()
        with pytest.raises(TimeoutError):
            await page.page("")
        looks.go.set()
        monkeypatch.setattr(scrape, "_PATIENCE_S", PATIENCE_S)
        assert (await page.page(""))[0].endswith(b"looks 1.0\n")

    looks = Looks()
    page = _scrape(looks, [0.0])
    monkeypatch.setattr(scrape, "_PATIENCE_S", 0.05)
    asyncio.run(play())
    assert looks.number == 1
