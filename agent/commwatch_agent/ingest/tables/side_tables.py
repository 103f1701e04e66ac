"""What is counted of a rank besides its cells and steps: numbers of collectives, waits, messages, what NCCL chose, failures. Pure."""

from __future__ import annotations

from collections import deque
from typing import Any

from commwatch.wire import events as ev
from commwatch.wire.numbers import latest
from commwatch_agent.ingest.stragglers import BIN_NS, MOST_BINS
from commwatch_agent.ingest.tables.weights import MESSAGES, NUMBERS, RAN, WAITS
from commwatch_agent.ingest.trainer_state import TrainerState
from commwatch_agent.model.cells import (
    LATEST_KNOWN,
    MOST_APART,
    MOST_KINDS,
    MOST_PEERS,
    OTHER_KIND,
    CellKey,
    Messages,
    Ran,
)
from commwatch_agent.model.shares import Account

_MOST_FAILURES = 16
#: Most groups with kept numbers, dropped groups included.
_MOST_NUMBERS = 2 * (MOST_APART + LATEST_KNOWN)


class SideTables(TrainerState):
    """The smaller tables of one rank; the arguments are those of ``TrainerState``."""

    def __init__(self, identity: dict[str, Any], account: Account | None = None) -> None:
        super().__init__(identity, account)
        #: By group: how long others waited for this rank; number of its latest collective that ended, or whose end is not seen.
        self.lateness_ns: dict[int, int] = {}
        self.last_seq: dict[int, int] = {}
        #: By group: launch of the collective in ``last_seq``; number of the latest whose end was not seen, or that was only counted.
        self.launched_ns: dict[int, int] = {}
        self.unseen: dict[int, int] = {}
        #: The groups in the latter three.
        self._numbered: set[int] = set()
        #: By (group, op, peer): sums over its messages and the waits for them.
        self.messages: dict[tuple[int, int, int], Messages] = {}
        #: By kind and what NCCL chose (``events.nccl_choice``): sums over the operations that NCCL timed.
        self.ran: dict[tuple[CellKey, int], Ran] = {}
        #: The latest operations that raised.
        self.failures: deque[ev.Record] = deque(maxlen=_MOST_FAILURES)
        #: Of a rank with messages: its waits for messages and for late ranks, by bins of ``stragglers.BIN_NS``.
        self.binned_waits_ns: dict[int, int] = {}

    def note_number(self, group: int, seq: int, launch_ns: int, unseen: bool) -> None:
        """Note the number and the launch of a group's latest collective; or that its end was not seen."""
        if not self._is_numbered(group):
            return
        if unseen:
            self.unseen[group] = seq
        else:
            self.last_seq[group], self.launched_ns[group] = seq, launch_ns

    def note_counted(self, group: int, seq: int, launch_ns: int) -> None:
        """Note the number and the launch of a group's latest collective that was only counted."""
        if not self._is_numbered(group):
            return
        # One record after another sums up operations of one kind, so that of an earlier operation may come later.
        self.last_seq[group] = latest((seq, self.last_seq.get(group, seq)))
        self.launched_ns[group] = max(launch_ns, self.launched_ns.get(group, 0))
        self.unseen[group] = seq

    def _is_numbered(self, group: int) -> bool:
        """Return whether the numbers of a group are kept."""
        if group not in self._numbered:
            if not self.account.take(NUMBERS):
                return False
            self._numbered.add(group)
        return True

    def forget_numbers(self) -> None:
        """Forget the numbers of groups that are not known any more, if there are too many."""
        if len(self._numbered) > _MOST_NUMBERS:
            forgotten = self._numbered - self.groups.keys()
            self._numbered -= forgotten
            self.account.give(NUMBERS * len(forgotten))
            for numbers in (self.last_seq, self.launched_ns, self.unseen):
                for group in forgotten & numbers.keys():
                    del numbers[group]

    def add_lateness(self, group: int, lateness_ns: int) -> None:
        """Add how long others waited for this rank."""
        self.lateness_ns[group] = self.lateness_ns.get(group, 0) + lateness_ns

    def add_wait(self, end_ns: int, waited_ns: int) -> None:
        """Add a wait of ``waited_ns`` that ended at ``end_ns``."""
        at, bins = end_ns // BIN_NS, self.binned_waits_ns
        if at not in bins and (len(bins) >= MOST_BINS or not self.account.take(WAITS)):
            if not bins:
                return
            del bins[next(iter(bins))]
        bins[at] = bins.get(at, 0) + waited_ns

    def ran_of(self, key: CellKey, choice: int) -> Ran:
        """Return the sums over the operations of a kind for which NCCL chose the same."""
        kind = key._replace(startup=False), choice
        if kind not in self.ran and (len(self.ran) >= MOST_KINDS or not self.account.take(RAN)):
            kind = OTHER_KIND, 0
        return self.ran.setdefault(kind, Ran())

    def messages_with(self, group: int, op: int, peer: int) -> Messages:
        """Return the sums over the messages with a peer; -1: of all peers that are not told apart."""
        whom = group, op, peer
        if whom not in self.messages and (len(self.messages) >= MOST_PEERS or not self.account.take(MESSAGES)):
            whom = group, op, -1
        return self.messages.setdefault(whom, Messages())

    def note_failure(self, record: ev.Record) -> None:
        """Store an operation in flight at its rank's death as failed."""
        self.failures.append(record)
