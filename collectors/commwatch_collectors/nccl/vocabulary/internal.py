"""Warnings that name the library's own state: nothing that a user did, and nothing that a setting mends."""

from __future__ import annotations

from commwatch_collectors.nccl.vocabulary.words import Words

_REPORT = (
    "If another error comes before it, that one is the cause. Otherwise use the newest version, and report the log at "
    "github.com/NVIDIA/nccl/issues."
)

INTERNAL: tuple[Words, ...] = (
    Words(
        "consequence",
        r"communicator encountered a fatal error|ncclAsyncJobComplete: job|commReclaim:|destroys proxy resource error|ncclCommSetAsyncError"
        r"|hostStreamPlanCallback\(\) failed|proxyDestroy failed|Legacy IPC cleanup|Barrier failed|barrier failed|handle exchange incomplete",
        "This is a consequence: the communicator failed before, and is being cleaned up.",
        "Find the first error of this process, or the rank that failed first.",
        "info",
    ),
    Words(
        "consequence",
        r"NET/OFI (?:Context progress failed|Failed to (?:process CQ|free|close|delete)|Unable to (?:free|close|deallocate)"
        r"|Failed call to (?:process_pending|check_post|dereg)|Error (?:de-registering|retrieving) MR)",
        "This is a consequence: a transfer of the plug-in failed before, or its resources are being given back.",
        "Find the first error of this process, or the rank that failed first.",
    ),
    Words(
        "internal",
        r"(?i:internal error|has bugs|pass NULL|wrong socket state|socket state \(|unexpected socket state|list loop|opId|proxy append"
        r"|proxyOps? )|Unknown (?:pattern|command|message type|unit)|invalid socket|out of bounds|does not loop back|does not contain rank"
        r"|posted incorrect receive info|should not be reached|Inactive op",
        "A check of the library on its own state failed: a bug, or a consequence of an earlier failure.",
        _REPORT,
        "error",
    ),
    Words(
        "timeout",
        r"(?i:timeout|timed out)",
        "A peer or a service did not answer in time.",
        "Check what the peer did at that time, then the network between the two.",
        "error",
    ),
)
