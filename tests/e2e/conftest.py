"""What the tests with real jobs share with pytest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.hosts import Host, two_hosts
from tests.e2e.quiet import QuietJob
from tests.helpers import agent


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Two hosts."""
    with two_hosts() as made:
        yield made


@pytest.fixture(scope="session")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuietJob]:
    """A healthy job beside the tests."""
    directory = tmp_path_factory.mktemp("quiet")
    with agent(directory) as running:
        job = QuietJob(running, directory)
        try:
            yield job
        finally:
            job.end()


@pytest.fixture(scope="session", autouse=True)
def _quiet_from_the_beginning(request: pytest.FixtureRequest) -> None:
    """It begins with the first test of this folder, if it is asked for at all: so nobody has to wait for its two minutes."""
    if any("quiet" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("quiet")
