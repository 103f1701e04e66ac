"""A Prometheus of our own, and how to ask it."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.error
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers import Fetch, fetch, free_port, needs, wait_for


class Prometheus:
    """A running Prometheus and how to ask it."""

    def __init__(self, port: int, fetch: Fetch) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._fetch = fetch

    def get(self, path: str) -> Any:
        """The ``data`` of an answer of its HTTP API."""
        answer = json.loads(self._fetch(f"{self.url}/api/v1/{path}")[0])
        assert answer["status"] == "success"
        return answer["data"]

    def query(self, promql: str) -> list[tuple[dict[str, str], float]]:
        """Labels and values of an instant query."""
        found = self.get(f"query?{urllib.parse.urlencode({'query': promql})}")["result"]
        return [(each["metric"], float(each["value"][1])) for each in found]

    def value(self, promql: str) -> float | None:
        """The one value of a query; ``None`` while there is none."""
        found = self.query(promql)
        assert len(found) <= 1, found
        return found[0][1] if found else None

    def ready(self) -> bool:
        """It answers."""
        try:
            return bool(self.get("status/buildinfo"))
        except (urllib.error.URLError, OSError):
            return False


@contextmanager
def prometheus(
    directory: Path,
    targets: list[str],
    rules: tuple[Path, ...] = (),
    *,
    tells: tuple[str, ...] = (),
    flags: tuple[str, ...] = (),
    there: tuple[str, ...] = (),
    fetch: Fetch = fetch,
    every_s: float = 0.5,
) -> Iterator[Prometheus]:
    """A Prometheus on a free port of 127.0.0.1 that scrapes ``targets`` and evaluates ``rules``, by default twice a second.

    Args:
        tells: Alertmanagers that it sends alerts to.
        flags: further arguments.
        there: prefix of the command that runs it on another host.
        fetch: sends its requests.
        every_s: seconds between scrapes, and between evaluations of the rules.
    """
    addresses, managers = ([each.removeprefix("http://") for each in urls] for urls in (targets, tells))
    every = f"{1000 * every_s:.0f}ms"
    config = {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": [str(file) for file in rules],
        "scrape_configs": [{"job_name": "commwatch", "static_configs": [{"targets": addresses}]}],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": managers}]}]},
    }
    (directory / "prom.yml").write_text(json.dumps(config))  # JSON is YAML
    with started(directory, directory / "prom.yml", flags=flags, there=there, fetch=fetch) as running:
        yield running


@contextmanager
def started(
    directory: Path, config: Path, *, flags: tuple[str, ...] = (), there: tuple[str, ...] = (), fetch: Fetch = fetch
) -> Iterator[Prometheus]:
    """A Prometheus with this configuration, and its data and log in the directory."""
    needs(shutil.which("prometheus"), "prometheus")
    port = free_port()
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={directory}/data"]
    with open(directory / "prometheus.log", "wb") as log:
        process = subprocess.Popen(
            [*there, *command, *flags, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
        )
    running = Prometheus(port, fetch)
    try:

        def ready() -> bool:
            assert process.poll() is None, (directory / "prometheus.log").read_text()
            return running.ready()

        wait_for(ready, "Prometheus")
        yield running
    finally:
        process.terminate()
        process.wait(30)
