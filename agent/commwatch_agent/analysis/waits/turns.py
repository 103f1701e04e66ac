"""Ranks that are late in turn, each for many steps in a row, as with loaders that stall now and then. Pure.

In ten seconds one of them may be late nearly all the time; in a minute all are. One that became late after another one recovered is no such rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from commwatch_agent.ingest.columns import Ints

#: A turn has so many periods at least; and so often at least it changes.
_TURN, _CHANGES = 5, 3
#: Part of the time by which other ranks lead that is in their turns, at least: what is by chance in each step is mostly not.
_IN_TURNS = 0.5
#: How many times as long as the turns of the other ranks those of a straggler are, at least.
_TIMES = 3


def take_turns(late: Ints, culprits: Sequence[int]) -> bool:
    """Return whether other ranks are late in turn with these.

    Args:
        late: [ranks, periods]: how late each rank was, over a minute if that is known.
        culprits: rows of those that are late now.
    """
    others_late = np.delete(late, culprits, axis=0)
    lead = late[culprits].max(axis=0) - others_late.max(axis=0)
    is_late = np.abs(lead) > np.quantile(np.abs(lead), 0.8) / 2
    who, lead = np.where(lead > 0, -1, others_late.argmax(axis=0))[is_late], lead[is_late]
    if not len(lead):
        return False
    begins = np.flatnonzero(np.append(True, who[1:] != who[:-1]))
    sums, lengths = np.add.reduceat(lead, begins), np.diff(np.append(begins, len(lead)))
    turns = sums[lengths >= _TURN]
    changes = int((np.diff(np.sign(turns)) != 0).sum())
    own, others = turns[turns > 0].sum(), -turns[turns < 0].sum()
    return bool(changes >= _CHANGES and others >= -_IN_TURNS * lead[lead < 0].sum() and own < _TIMES * others)
