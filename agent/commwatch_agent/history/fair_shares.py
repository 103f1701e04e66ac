"""Fair shares of a bound: between users, and between the jobs of a user. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Owner(NamedTuple):
    """Whose a ring is; ``None``: not known."""

    uid: int | None
    job: str | None


def fair_share(sizes: Iterable[float], most: float) -> float:
    """Return how much each owner may keep, so that all of them together have ``most``: what one does not need, the others may have.

    >>> fair_share([10, 50, 100], 90)
    40.0
    """
    waiting = sorted(sizes)
    for place, size in enumerate(waiting):
        share = most / (len(waiting) - place)
        if size > share:
            return share
        most -= size
    return max(waiting, default=0.0)


def excesses(sizes: Mapping[Owner, float], most: float) -> dict[Owner, float]:
    """Return by how much jobs exceed their share of ``most``: of what their user may keep, who shares it with other users.

    >>> excesses({Owner(1, "a"): 10, Owner(1, "b"): 50, Owner(2, "c"): 20}, 60)
    {Owner(uid=1, job='b'): 20.0}
    """
    users: dict[int | None, dict[Owner, float]] = {}
    for owner, size in sizes.items():
        users.setdefault(owner.uid, {})[owner] = size
    of_user = fair_share((sum(jobs.values()) for jobs in users.values()), most)
    found = {}
    for jobs in users.values():
        share = fair_share(jobs.values(), of_user)
        found.update({owner: size - share for owner, size in jobs.items() if size > share})
    return found
