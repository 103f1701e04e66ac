"""Compression of raw records. Pure.

Byte k of all records comes before byte k + 1 of all records, because bytes of one field resemble one another. Measured on
records of four groups at 2,000/s, with zlib at level 1: 12.5 bytes a record and 0.26 µs, against 19.3 bytes and 0.35 µs for
records one after the other. zstandard would take 11 bytes and 0.09 µs, but is another package to install.
"""

from __future__ import annotations

import zlib

from commwatch.collectors.wire.events import RECORD_SIZE

#: First byte of data in columns. Data of versions before 5 are records one after the other, and begin as zlib does.
_COLUMNS = b"\x01"


def pack(records: bytes | bytearray) -> bytes:
    """Return whole records, compressed."""
    import numpy as np  # an agent without trainers does not need it

    rows = np.frombuffer(records, np.uint8).reshape(-1, RECORD_SIZE)
    return _COLUMNS + zlib.compress(rows.T.tobytes(), 1)


def unpack(data: bytes, most_bytes: int) -> bytes:
    """Return the records in ``data``, of this or an earlier version.

    Raises:
        ValueError: they are more than ``most_bytes``, cut short, or no records.
    """
    columns = data[:1] == _COLUMNS
    unpacking = zlib.decompressobj()
    try:
        found = unpacking.decompress(data[len(_COLUMNS) :] if columns else data, most_bytes)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not unpacking.eof:
        raise ValueError(f"more than {most_bytes} bytes, or cut short")
    if len(found) % RECORD_SIZE:
        raise ValueError(f"{len(found)} bytes are not a whole number of records")
    return _rows(found) if columns else found


def _rows(columns: bytes) -> bytes:
    count = len(columns) // RECORD_SIZE
    records = bytearray(len(columns))
    for at in range(RECORD_SIZE):
        records[at::RECORD_SIZE] = columns[at * count : (at + 1) * count]
    return bytes(records)
