"""Findings of what other programs print in the log. ``findings.py`` has those of NCCL, and their order."""

from __future__ import annotations

from commwatch_collectors.nccl.beside import libraries, processes, timeouts
from commwatch_collectors.nccl.checks.evidence import Rule
from commwatch_collectors.nccl.checks.order import CONSEQUENCE, SYMPTOM

#: What other failures follow from.
CAUSES: tuple[Rule, ...] = (
    Rule(
        "process_failed",
        "error",
        "a process ended with an error",
        "The other ranks cannot go on without it.",
        "Look at that process first.",
        processes.failed,
    ),
    Rule(
        "gpu_fault",
        "error",
        "the driver reports a fault of a GPU",
        "Programs on that GPU fail, and the other ranks wait for them.",
        "Look into dmesg of that node.",
        processes.gpu_faults,
    ),
)
FAILURES: tuple[Rule, ...] = (
    Rule(
        "framework_error",
        "error",
        "a program gave up on an NCCL call",
        "The call returned this error. NCCL prints the reason only at NCCL_DEBUG=WARN.",
        "Run again with NCCL_DEBUG=WARN.",
        libraries.framework_errors,
        CONSEQUENCE,
    ),
    Rule(
        "watchdog_stuck",
        "error",
        "PyTorch's watchdog thread is stuck",
        "A CUDA call blocks it, or another thread that holds Python's GIL. The process hangs, whether or not a collective is late.",
        "Take the stacks of that process while it hangs (py-spy dump --native). If it was only slow, as with a long compilation, "
        "raise TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC.",
        timeouts.stuck,
        SYMPTOM,
    ),
    Rule(
        "barrier_failed",
        "error",
        "ranks did not reach a monitored barrier",
        "The barrier waits for all ranks, and names those that do not come.",
        "Find out what these ranks did instead: an exception, another collective, a hang.",
        libraries.barriers,
        SYMPTOM,
    ),
    Rule(
        "gloo_error",
        "error",
        "an operation of Gloo failed",
        "Gloo connects the processes of a job over TCP, mostly for small data on the host.",
        "Look at the other rank first.",
        libraries.gloo,
        SYMPTOM,
    ),
    Rule(
        "gloo_peer_lost",
        "error",
        "a process that Gloo was connected to ended",
        "This follows from the end of that process.",
        "Find the rank at that address that failed first; its log has the reason.",
        libraries.gloo_peers,
        CONSEQUENCE,
    ),
    Rule(
        "store_error",
        "error",
        "the job's store failed",
        "PyTorch's ranks find each other through a TCPStore.",
        "Look at the process that holds it.",
        libraries.store,
        SYMPTOM,
    ),
    Rule(
        "ucx_error",
        "error",
        "UCX reports an error",
        "UCX carries MPI's messages, and NCCL's with some plug-ins.",
        "If the peer did not answer, check whether it failed first, then the link (ibstat, error counters) and UCX_NET_DEVICES.",
        libraries.ucx,
        SYMPTOM,
    ),
)
EVENTS: tuple[Rule, ...] = (
    Rule(
        "gpu_event",
        "info",
        "the driver has logged an event of a GPU",
        "This is no failure by itself.",
        "If programs on that GPU failed at that time, look up the number in NVIDIA's list of Xid errors.",
        processes.gpu_events,
    ),
)
