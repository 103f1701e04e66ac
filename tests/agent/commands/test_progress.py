"""The status line of ``commwatch run``."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import sys
import termios
import time
from pathlib import Path

import pytest

from commwatch.wire.numbers import NUMBERS
from commwatch_agent.commands.progress import Progress
from commwatch_agent.text.terminal_text import output_cells
from tests.helpers import MS, Watch, end_rank, mark, write_ring


@pytest.mark.parametrize(("size", "last", "first"), [((50, 100), 50, 0), ((0, 0), 30, 0), ((50, 100), 50, NUMBERS - 2)])
def test_last_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], last: int, first: int
) -> None:
    """The line is on the last row of the terminal behind standard error, whatever standard output is; where its size is unknown, of ``LINES``."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")
    watch = Watch(tmp_path)
    end_rank(
        write_ring(
            watch.rings,
            [mark((first + n) % NUMBERS, n * MS) for n in range(3)],
            wall_offset_ns=time.time_ns(),
            run="0a1b",
        )
    )
    watch.intake.tick(0, time.time_ns())
    watch.store.close()
    terminal, behind = pty.openpty()
    fcntl.ioctl(behind, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    with open(behind, "w", encoding="utf-8") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        assert output_cells(sys.stderr) == 100
        Progress(watch.path, "0a1b").show()
        monkeypatch.undo()
        os.set_blocking(terminal, False)  # an error if nothing was drawn
        drawn = os.read(terminal, 65_536).decode()
    os.close(terminal)
    assert f"\x1b[1;{last - 1}r" in drawn
    assert f"\x1b[{last};1H\x1b[2Kcommwatch: step {(first + 2) % NUMBERS}, " in drawn
