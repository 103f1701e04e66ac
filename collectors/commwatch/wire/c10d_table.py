"""The table of PyTorch's ``c10d`` operators: which operation each one is, and which arguments hold its bytes.

Sizes follow nccl-tests (docs/numbers.md): S is one rank's buffer for all_reduce, broadcast, reduce, send, recv; the
gathered size for all_gather and gather; the size before the split for reduce_scatter and scatter; the larger of
input and output for all_to_all. A coalesced operator is one operation whose S is the sum.
"""

from __future__ import annotations

import enum


class Measure(enum.IntEnum):
    """Which arguments of an operator are summed to S; the native hook uses the numbers."""

    NONE = 0
    #: The first argument: a tensor, tensors, or a list of them for each of this rank's inputs.
    FIRST = 1
    SECOND = 2
    #: On the root the outputs (first); on other ranks the input (second) times the group's size.
    GATHERED = 3
    #: On the root the inputs (second); on other ranks the output (first) times the group's size.
    SCATTERED = 4
    #: The larger of the first and second argument.
    LARGER = 5


#: c10d operator -> canonical op, and how its bytes are measured.
C10D_OPS: dict[str, tuple[str, Measure]] = {
    "allreduce_": ("all_reduce", Measure.FIRST),
    "allreduce_coalesced_": ("all_reduce", Measure.FIRST),
    "allgather_": ("all_gather", Measure.FIRST),
    "_allgather_base_": ("all_gather", Measure.FIRST),
    "allgather_coalesced_": ("all_gather", Measure.FIRST),
    "allgather_into_tensor_coalesced_": ("all_gather", Measure.FIRST),
    "reduce_scatter_": ("reduce_scatter", Measure.SECOND),
    "_reduce_scatter_base_": ("reduce_scatter", Measure.SECOND),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", Measure.SECOND),
    "alltoall_": ("all_to_all", Measure.LARGER),
    "alltoall_base_": ("all_to_all", Measure.LARGER),
    "broadcast_": ("broadcast", Measure.FIRST),
    "reduce_": ("reduce", Measure.FIRST),
    "gather_": ("gather", Measure.GATHERED),
    "gather_into_tensor_": ("gather", Measure.GATHERED),
    "scatter_": ("scatter", Measure.SCATTERED),
    "send": ("send", Measure.FIRST),
    "recv_": ("recv", Measure.FIRST),
    "recv_any_source_": ("recv", Measure.FIRST),
    "barrier": ("barrier", Measure.NONE),
    "monitored_barrier_": ("barrier", Measure.NONE),
}
#: Operators of the namespace that do not communicate.
NOT_COMMUNICATION = frozenset({"check_for_nan"})
