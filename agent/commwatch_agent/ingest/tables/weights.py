"""About how many bytes the entries of the tables in memory take, and how many bytes they may take together. Pure.

``tests/agent/test_all_limits.py`` fills all tables at once and compares.
"""

from __future__ import annotations

#: Bytes of all tables of all ranks and jobs, besides what each rank and each job has of its own.
ALL_BYTES, OWN_BYTES = 160 << 20, 16 << 10
#: Bytes of the collectives of one job that wait for a rank, with the lateness in those that are complete.
OF_JOB_BYTES = 48 << 20
#: Bytes of the sums of ranks that have ended while their job goes on, or is still in ``/metrics``; and most of these ranks.
ENDED_BYTES, MOST_ENDED = 24 << 20, 1024

#: A kind of operations: its sums, its live cell, and its cells of the last minute; what is left of that when the rank has ended.
KIND, ENDED_KIND = 7000, 800
#: A duration in a sketch that grows, and in a packed one.
BIN, PACKED_BIN = 110, 6
#: A join of a group; a part of a collective in it; a rank's latest run in it.
JOIN, PART, RUN = 3000, 660, 250
#: The messages with one peer; the operations for which NCCL chose the same.
MESSAGES, RAN = 400, 4000
#: The numbers of a group's latest collectives; a bin of waits; an operation in flight; a sample of a process.
NUMBERS, WAITS, IN_FLIGHT, SAMPLE = 500, 110, 700, 400
#: A step in the window of the shares; a mark or a moment that is in no step yet; an interval of communication.
STEP, MARK, MOMENT, PIECE = 450, 250, 40, 16
