"""The exposed time of steps is at most what threads were blocked in their operations, where that is known. Pure.

On the CPU, exposed time is the idle time of the training thread beside communication: also what it slept there, or waited for a core.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from commwatch_agent.ingest.columns import Flags, Ints
from commwatch_agent.ingest.own_time_state import Blocked

#: Longer times (39 hours) are cut off, so that sums fit.
_MOST_NS = 1 << 47


def blocked(waited_us: Ints, duration: Ints, knows_wait: Flags) -> Ints:
    """Return how long threads were blocked in each operation at most, in ns."""
    longest: Ints = np.minimum(np.where(knows_wait, np.minimum(waited_us * 1000, duration), duration), _MOST_NS)
    return longest


def between_marks(
    of_records: Ints, places: Sequence[int], until: int, before: Blocked
) -> tuple[list[Blocked], Blocked]:
    """Return what belongs to each step mark of a rank, and what to its next one.

    Args:
        of_records: [3, records + 1]: the fields of ``Blocked``, summed over the records before each.
        places: the first record of the rank, then its step marks; ``until``: the place after its last record.
        before: what belongs to its first mark from earlier batches.
    """
    found = []
    for since, end in zip(places, [*places[1:], until], strict=True):
        here = (of_records[:, end] - of_records[:, since]).tolist()
        found.append(Blocked(*(old + new for old, new in zip(before, here, strict=True))))
        before = Blocked()
    return found[:-1], found[-1]
