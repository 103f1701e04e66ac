"""Compressed data of others: read whole, within limits of their unpacked size."""

from __future__ import annotations

import gzip
import io
from random import Random
from typing import IO, cast

import pytest

from commwatch_agent.model.unpacking import Unpacking, UnpacksToMore


def read_all(plain: Unpacking, taken: list[int]) -> None:
    """Read to the end; ``taken`` gets the lengths of the pieces."""
    while piece := plain.read(1 << 16):
        taken.append(len(piece))


def bomb(mebibytes: int) -> bytes:
    """Zeros, in a thousandth of their size."""
    return gzip.compress(bytes(1 << 20)) * mebibytes


def test_whole() -> None:
    """All members of a file are read, in whichever way, and the file remains open."""
    data = Random(8).randbytes(300_000) + bytes(1_000_000)
    packed = io.BytesIO(gzip.compress(data) + gzip.compress(data[:1000]))
    with Unpacking(packed) as plain:
        assert b"".join(iter(lambda: plain.read1(4096), b"")) == data + data[:1000]
    packed.seek(0)
    with io.TextIOWrapper(cast("IO[bytes]", Unpacking(packed)), encoding="latin-1", newline="") as text:
        assert text.read().encode("latin-1") == data + data[:1000]
    assert not packed.closed


def test_ratio() -> None:
    """Data that unpack to far more than their size are refused while they are read; the limit applies to what was read of them so far."""
    for packed in (bomb(100), bomb(100) + Random(8).randbytes(1 << 20)):
        taken: list[int] = []
        with Unpacking(io.BytesIO(packed)) as plain, pytest.raises(UnpacksToMore, match="200 times its size"):
            read_all(plain, taken)
        assert sum(taken) <= 64 << 20


def test_usual_ratio() -> None:
    """A large file that unpacks to 100 times its size is read to its end."""
    member = gzip.compress(Random(8).randbytes(10_000) + bytes(1 << 20))
    with Unpacking(io.BytesIO(member * 100)) as plain:
        assert sum(map(len, iter(lambda: plain.read(1 << 16), b""))) == 100 * ((1 << 20) + 10_000)


def test_most_bytes() -> None:
    """A limit in bytes applies, too."""
    with (
        Unpacking(io.BytesIO(bomb(2)), 1 << 20) as plain,
        pytest.raises(UnpacksToMore, match="more than 1048576 bytes"),
    ):
        read_all(plain, [])
