"""Columns of integers as text, in answers for other agents. Pure; without numpy until it is used."""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commwatch_agent.ingest.columns import Ints


def packed(values: Ints) -> str:
    """Return integers as text: byte k of all values before byte k + 1 of all, compressed."""
    import numpy as np

    planes = np.frombuffer(values.astype("<i8").tobytes(), np.uint8).reshape(-1, 8).T
    return b64encode(zlib.compress(planes.tobytes(), 1)).decode()


def unpacked(text: str, most: int) -> Ints:
    """Return the values that ``packed`` was given; raise ``ValueError`` if they are not at most ``most`` integers."""
    import numpy as np

    unpacking = zlib.decompressobj()
    try:
        planes = unpacking.decompress(b64decode(text, validate=True), 8 * max(1, most))
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not unpacking.eof or len(planes) % 8:
        raise ValueError("a column that is too long, or cut short")
    rows = np.frombuffer(planes, np.uint8).reshape(8, -1).T
    return np.frombuffer(rows.tobytes(), "<i8").astype(np.int64)
