"""A trainer that loses descriptors, room or the run directory trains as it does without the probe, and its files are its own."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from commwatch.wire import ring
from commwatch.wire.ring_reader import RingReader
from tests.e2e.torchjob import UPSTREAM_FLAKE, preforked, read_rings
from tests.helpers import BOTH_HOOKS, PATIENCE_S, clean_env, needs, small_tmpfs

pytestmark = pytest.mark.long

#: What the user has of a run: exit code, output (by lines, for ranks mix), and files.
Outcome = tuple[int, list[str], dict[str, bytes]]
#: By trouble: why the probe does not record, whether it records all the same, and whether there is room for names.
TROUBLES = {
    "closed": ("", True, True),
    "one descriptor left": ("", True, True),
    "small files": ("File too large", False, False),
    "little memory": ("Cannot allocate memory", False, False),
    "no threads": ("Resource temporarily unavailable", False, False),
    "full": ("", True, False),
    "taken away": ("", False, False),
}


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user reaches, for the job that becomes another."""
    with tempfile.TemporaryDirectory(prefix="commwatch-test-") as made:
        Path(made).chmod(0o777)
        yield Path(made)


def trained(place: Path, trouble: str, run: Path, **env: str) -> tuple[Outcome, str]:
    """How the job ended, and its standard error."""
    own = place / "own"
    own.mkdir()
    slots = "16000000" if trouble == "little memory" else ""
    command = preforked("deprived.py", 2, trouble, str(own), str(run))
    job = clean_env(COMMWATCH_DIR=str(run), COMMWATCH_SLOTS=slots, **env)
    done = subprocess.run(
        command, env=job, capture_output=True, text=True, timeout=3 * PATIENCE_S, check=False, cwd=place
    )
    flake = done.stdout.count("job done") == 2 and UPSTREAM_FLAKE in done.stderr
    files = {path.name: path.read_bytes() for path in own.iterdir()}
    return (0 if flake else done.returncode, sorted(done.stdout.splitlines()), files), done.stderr


@pytest.fixture(scope="module")
def undisturbed() -> Outcome:
    """How the job ends without the probe, and without a trouble."""
    with tempfile.TemporaryDirectory() as made:
        outcome, said = trained(Path(made), "nothing", Path(made, "run"), COMMWATCH_DISABLE="1")
    code, output, files = outcome
    assert (code, output.count("job done"), len(files)) == (0, 2, 18), said[-4000:]
    assert [files[f"open-{rank}"] for rank in range(2)] == [b"CHECKPOINT WHOLE\n" * 2] * 2
    return outcome


@BOTH_HOOKS
@pytest.mark.usefixtures("hook")
@pytest.mark.parametrize("trouble", TROUBLES)
def test_training_does_not_notice(trouble: str, place: Path, undisturbed: Outcome) -> None:
    """DDP and FSDP2 end with the exit code, the output, the losses and the files, byte for byte, that they have without the probe."""
    needs(os.getuid() == 0 or trouble not in ("no threads", "full"), "root, to mount and to become another user")
    says, records, room = TROUBLES[trouble]
    with small_tmpfs(place / "small", 8 << 20):
        run = place / ("small" if trouble == "full" else "run")
        outcome, said = trained(place, trouble, run, COMMWATCH="1")
        ours = [line for line in said.splitlines() if line.startswith("commwatch: ")]
        assert outcome == undisturbed, said[-4000:]
        assert len(ours) == (2 if says else 0), ours
        assert all("not recording this run" in line and says in line for line in ours), ours
        assert "Traceback" not in said
        if trouble == "taken away":
            assert {path.read_bytes() for path in run.glob("rings/*")} == {b"of the user\n"}
        elif records:
            ranks = read_rings(run)
            assert [len(rank.operations) for rank in ranks] == [len(ranks[0].operations)] * 2
            assert len(ranks[0].operations) > 50
            assert (len(ranks[0].groups) > 16) is room
        elif trouble == "no threads":  # the user that the job has become may not remove the file, which has ended
            assert all(RingReader(path).counter(ring.CLOSED) for path in run.glob("rings/*.ring"))
        else:
            assert not list(run.glob("rings/*"))
