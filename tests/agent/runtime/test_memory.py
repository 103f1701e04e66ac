"""The agent's memory: one heap for all threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

ALLOCATING = """
import ctypes, sys, threading
from commwatch_agent.runtime.memory import share_one_heap
if sys.argv[1] == "shared":
    share_one_heap()
turn = threading.Barrier(5)
def work():
    turn.wait()
    kept = ctypes.create_string_buffer(10_000)
    turn.wait()
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
turn.wait()
ctypes.CDLL(None).malloc_stats()
turn.wait()
"""


@pytest.mark.parametrize(("words", "several"), [("shared", False), ("default", True)])
def test_one_heap(words: str, several: bool) -> None:
    """Threads allocate from one heap, where glibc would give each its own."""
    process = subprocess.run([sys.executable, "-c", ALLOCATING, words], capture_output=True, text=True, check=True)
    assert "Arena 0:" in process.stderr
    assert ("Arena 1:" in process.stderr) == several
