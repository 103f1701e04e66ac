"""Warnings about failed transfers over InfiniBand and RoCE, and about events of cards, ports and queues."""

from __future__ import annotations

from commwatch_collectors.nccl.vocabulary.words import Words

_OVER = "The communicator is unusable from here on; the job has to be restarted."
_GDR = (
    "NCCL_NET_GDR_LEVEL=LOC, without GPUDirect RDMA and slower, shows whether that is the cause. NCCL_LOCAL_REGISTER=0 and "
    "NCCL_GRAPH_REGISTER=0 show whether registered buffers are."
)
_SAME = "Use one version of NCCL, of its network plug-in and of its settings (NCCL_…) on all nodes."
_LOCAL = (
    f"Keep buffers until the collectives that use them have ended. For memory of GPUs, load nvidia-peermem in the version of the driver, or "
    f"use DMA-BUF. {_GDR}"
)


def _status(status: int, means: str, do: str) -> Words:
    """Return the entry of one ``ibv_wc_status``, in each form of the warning."""
    return Words(
        "ib_completion_error",
        rf"Got completion.{{0,200}}? (?:with error {status}\b|(?:with )?status=(?:[A-Z_]{{1,40}}\()?{status}\b)",
        f"{means} {_OVER}",
        do,
        "error",
    )


_COMPLETIONS: tuple[Words, ...] = (
    _status(
        1,
        "A message was longer than the buffer that waited for it here.",
        f"Compare the collectives and sizes of the ranks. {_SAME}",
    ),
    _status(
        2,
        "The card could not carry out a request of this process.",
        f"Look for an event of the card or queue before this line. {_SAME} {_GDR}",
    ),
    _status(4, "Memory of this process was not registered with the card, or not any more.", _LOCAL),
    _status(
        5,
        "This request was cancelled because another one of the same queue had failed.",
        "Find the request or the process that failed first: another status in this log, or the log of the peer.",
    ),
    _status(
        9,
        "The card of the peer refused a request: no buffer of that size waited for it, or the two sides do not agree.",
        f"Look at the peer: did it fail first? {_SAME} Compare the collectives and sizes of the ranks. {_GDR}",
    ),
    _status(
        10,
        "The card of the peer refused access: its memory is not registered any more, mostly because its process has ended.",
        f"Look at the peer: did it fail first? Otherwise keep buffers until all ranks have ended the collective. {_GDR}",
    ),
    _status(
        11,
        "The card of the peer could not carry out a request.",
        "Look for an event of a card, and into dmesg, on the node of the peer.",
    ),
    _status(
        12,
        "The peer did not answer any more.",
        "Check the peer first (did it crash?), then the link (ibstat, error counters), and on RoCE NCCL_IB_GID_INDEX and flow control. "
        "Only then raise NCCL_IB_TIMEOUT.",
    ),
    _status(
        13,
        "The peer answers, but had no buffer ready in time.",
        f"Find out what the peer did at that time: it hangs, or is stopped. {_SAME}",
    ),
    Words(
        "ib_completion_error",
        r"Got completion|Got CQE with error|Unsupported completion status",
        _OVER,
        "Look for the first error of a transfer or a card, in this log and the peer's. Then check the link (ibstat, error counters).",
        "error",
    ),
)

_EVENTS: tuple[Words, ...] = (
    Words(
        "ib_async_event",
        r"Got (?:non-fatal )?async event.{0,40}(?i:port active|client reregist|(?:LID|SM|GID table|P_?Key(?: table)?) change"
        r"|communication established|last WQE|send queue drained)|GID table changed|unknown event type",
        "A port came up, or its addresses or its subnet manager changed. This is not a failure in itself.",
        "If transfers failed at that time, check the fabric.",
        "info",
    ),
    Words(
        "ib_async_event",
        r"async (?:fatal |error )?event.{0,200}(?:invalid request|local access violation)",
        "The card refused a request: its memory is not registered, or the two sides do not agree on sizes. Mostly software is the cause.",
        f"Look for a completion with an error at that time: its status says more. {_SAME} {_GDR}",
        "error",
    ),
    Words(
        "ib_async_event",
        r"async (?:fatal |error )?event.{0,200}(?:work queue catastrophic|SRQ catastrophic|CQ error|path migration)|event on (?:QP|CQ|SRQ)",
        "The card has stopped a queue of this process. Transfers over it will fail next.",
        "Look for a completion with an error at that time: its status says more. Otherwise look for the card (mlx5_core) in dmesg, and use one "
        "version of its driver and firmware on all nodes.",
        "error",
    ),
    Words(
        "ib_async_event",
        r"async (?:fatal |error )?event.{0,40}port err",
        "A port went down. Transfers over it will fail next.",
        "Check ibstat, the switch's log of that port at that time, and dmesg. Replace the cable or the transceiver if it happens again.",
        "error",
    ),
    Words(
        "ib_async_event",
        r"async (?:fatal |error )?event.{0,40}(?:local catastrophic|device fatal)",
        "The card itself failed. Transfers over it will fail next.",
        "Look for the card (mlx5_core) in dmesg. Restart the node and update the card's firmware; replace the card if it happens again.",
        "error",
    ),
    Words(
        "ib_async_event",
        r"Got .{0,80}event|async fatal event",
        "The card reports an event. Transfers over it may fail next.",
        "Check dmesg and ibstat at that time.",
        "error",
    ),
)

INFINIBAND: tuple[Words, ...] = (*_COMPLETIONS, *_EVENTS)
