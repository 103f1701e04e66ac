"""What all tests share with pytest: which hook a job has, where the native one is built, and a browser."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from tests.helpers import clean_env, needs
from tests.lengths import keep, known_lengths, places
from tests.trees import procfs

if TYPE_CHECKING:  # slow to import, for what few tests need
    from playwright.sync_api import Browser

    from tests.browser import Chromium

#: Kept between runs; what is built is named for its source, so nothing old is ever taken.
CACHE = Path(__file__).parents[1] / ".stamps" / "cache"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among modules and tests, which all stay: not now, and not whenever a test looks for its own."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by what it starts, as pyproject.toml lists it; ``unit``: nothing of that. Put the modules in order."""
    kinds: dict[str, str] = {}
    for item in items:
        kind = _kind(item)
        item.add_marker(kind)
        kinds.setdefault(_module(item), kind)
    place = places(kinds, known_lengths())
    items.sort(key=lambda item: place[_module(item)])


def _module(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


_JOBS = Path(__file__).parent / "e2e"
_LENGTHS = pytest.StashKey[defaultdict[str, float]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option with which ``make test`` runs whole modules."""
    parser.addoption(
        "--keep-lengths", action="store_true", help="keep how long modules take, for the order of the next run"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Measure how long modules take, in the process that the workers report to."""
    if config.getoption("keep_lengths") and "PYTEST_XDIST_WORKER" not in os.environ:
        lengths = config.stash[_LENGTHS] = defaultdict[str, float](float)
        config.pluginmanager.register(_Clock(lengths))


class _Clock:
    def __init__(self, lengths: defaultdict[str, float]) -> None:
        self._lengths = lengths

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._lengths[report.nodeid.partition("::")[0]] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keep the lengths for the order of the next run."""
    if lengths := session.config.stash.get(_LENGTHS, None):
        keep(lengths)


#: What a module imports that starts processes, by where it comes from, and otherwise by its name.
_RUNS_PROMETHEUS = {"tests.prometheus", "tests.alerts.promtool"}
_STARTS_PROCESSES = {"agent", "commwatch", "subprocess", "Commwatch", "Trainer", "Worker"}


def _kind(item: pytest.Item) -> str:
    """Return the marker of a test. What its module imports decides, so that no test has to be marked by hand."""
    if item.path.is_relative_to(_JOBS):
        return "job"
    if "browser" in getattr(item, "fixturenames", ()):
        return "browser"
    return _kind_of_module(item.module) if isinstance(item, pytest.Function) else "unit"


@cache
def _kind_of_module(module: ModuleType) -> str:
    names = vars(module)
    sources = {getattr(value, "__module__", None) or "" for value in names.values()}
    if sources & _RUNS_PROMETHEUS:
        return "prometheus"
    starts = names.keys() & _STARTS_PROCESSES or any(source.startswith("bench.") for source in sources)
    return "agent" if starts else "unit"


@pytest.fixture(scope="session", autouse=True)
def _own_cache() -> None:
    os.environ["XDG_CACHE_HOME"] = str(CACHE)


@pytest.fixture(scope="session", autouse=True)
def _signals_are_heard() -> None:
    # Under nohup, or in the background of a script, they are ignored, and so would the agents that tests start.
    for number, heard in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, heard)


@pytest.fixture(autouse=True)
def _own_procfs() -> Iterator[None]:
    # Tests of recorded hosts change it, for the whole process.
    with procfs(Path("/proc")):
        yield


@pytest.fixture(scope="session")
def native(_own_cache: None) -> Path:
    """The native hook, built."""
    command = [sys.executable, "-m", "commwatch.probe.native.build", "build"]
    built = subprocess.run(command, env=clean_env(), capture_output=True, text=True, timeout=1000, check=False)
    assert built.returncode == 0, built.stderr
    return Path(built.stdout.strip())


@pytest.fixture
def hook(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The hook that the jobs of this test have: the native one, unless the test is about both (``tests.helpers.BOTH_HOOKS``)."""
    name: str = getattr(request, "param", "native")
    if name == "native":
        request.getfixturevalue("native")
    monkeypatch.setenv("TESTED_HOOK", name)
    return name


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that everybody reaches, made under a umask that keeps nothing from anybody."""
    needs(os.getuid() == 0, "root, to act as another user")
    place, before = Path(tempfile.mkdtemp(prefix="commwatch-public-")), os.umask(0)
    place.chmod(0o755)
    try:
        yield place
    finally:
        os.umask(before)
        shutil.rmtree(place)


@pytest.fixture(scope="session")
def _browser_of_worker() -> Iterator[tuple[Browser, asyncio.AbstractEventLoop]]:
    from tests.browser import launched

    with launched() as browser:
        loop = asyncio.get_running_loop()
        asyncio._set_running_loop(None)
        yield browser, loop
        asyncio._set_running_loop(loop)


@pytest.fixture(scope="module")
def browser(_browser_of_worker: tuple[Browser, asyncio.AbstractEventLoop]) -> Iterator[Browser]:
    """A running Chromium, the same for all modules. Its event loop is that of this thread only meanwhile, as other tests run their own."""
    browser, loop = _browser_of_worker
    asyncio._set_running_loop(loop)
    yield browser
    asyncio._set_running_loop(None)


@pytest.fixture(scope="module")
def chromium(browser: Browser) -> Chromium:
    """Chromium, for ``visit``; see tests/browser.py."""
    from tests.browser import Chromium

    pictures = os.environ.get("SCREENSHOTS")
    return Chromium(browser, Path(pictures) if pictures else None)
