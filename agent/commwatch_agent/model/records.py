"""Records of the ring as numpy arrays. Import it only where there are records: an agent without trainers does not need numpy."""

from __future__ import annotations

import numpy as np

#: One record of the ring (``events.RECORD``).
RECORD = np.dtype([
    ("stamp", "<u4"), ("op", "u1"), ("dtype", "u1"), ("group", "<u2"), ("peer", "<i4"), ("tag", "<i4"), ("size", "<u8"),
    ("launch", "<u8"), ("seq", "<u4"), ("waited", "<u4"), ("start", "<u8"), ("end", "<u8"), ("flags", "u1"), ("timing", "u1"),
    ("aux", "<u2"), ("stamp2", "<u4"),
])  # fmt: skip
