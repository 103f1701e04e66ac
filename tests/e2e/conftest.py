"""What the tests with real jobs share with pytest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.hosts import Host, joined_hosts
from tests.e2e.quiet import QuietJob
from tests.helpers import agent


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two hosts."""
    with joined_hosts(2) as made:
        yield made


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuietJob]:
    """A healthy job beside the tests of a module."""
    directory = tmp_path_factory.mktemp("quiet")
    with agent(directory) as running:
        job = QuietJob(running, directory)
        try:
            yield job
        finally:
            job.end()


@pytest.fixture(scope="module", autouse=True)
def _native_hook(native: Path) -> Iterator[None]:
    # The jobs of these tests have it, unless a test asks for the other one.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TESTED_HOOK", "native")
        yield
