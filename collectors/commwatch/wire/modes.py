"""How much the probe records of the operations: the modes that ``probe/governor.py`` chooses from, as a ring states them. Pure."""

from __future__ import annotations

#: ``full``: every operation; ``sampling``: one in sixteen, the others counted; ``counters``: counts and bytes only.
MODES = ("full", "sampling", "counters")
FULL, SAMPLING, COUNTERS = range(3)
#: Number of bits of one in sixteen.
SAMPLE_BITS = 4
#: Share of the operations that is recorded, 0 to 1, by mode.
RECORDED = (1.0, 0.5**SAMPLE_BITS, 0.0)
