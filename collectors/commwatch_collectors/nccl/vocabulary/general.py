"""Words that show the class of a warning, not its cause: they are tried last."""

from __future__ import annotations

from commwatch_collectors.nccl.vocabulary.words import Words

GENERAL: tuple[Words, ...] = (
    Words(
        "version_mismatch",
        r"version mismatch",
        "A communicator cannot mix versions: its init fails, hangs or crashes.",
        "Use one image or environment on all nodes; look for a second libnccl in LD_LIBRARY_PATH.",
        "error",
    ),
    Words(
        "ib_async_event",
        r"Got .{0,80}event|async fatal event|GID table changed",
        "A port went down, or a queue or the card itself failed. Transfers over it will fail next.",
        "Check dmesg and the switch's log of that port at that time. Replace the cable or the card if it happens again.",
        "error",
    ),
    Words(
        "cuda_error",
        r"(?i:cuda failure|hip failure)",
        "A kernel or a driver call failed; NCCL is often only the first to notice.",
        "Look for Xid errors in dmesg, and check the memory in use. CUDA_LAUNCH_BLOCKING=1 shows which kernel failed.",
        "error",
    ),
    Words(
        "mismatch",
        r"Mismatched collective|collective mismatch|[Mm]essage truncated|mismatch in rank count|mismatch with rank",
        "One rank calls a different collective, passes a different size or uses a different order: the job hangs, or data is corrupted.",
        "Look for a branch around the collective that depends on rank or data. Run with TORCH_DISTRIBUTED_DEBUG=DETAIL.",
        "error",
    ),
    Words(
        "system_error",
        r"Call to (?!recv\b|send\b)\S{1,200} failed|Unable to open device|\[Service thread\]|\[Proxy Service|SHARP coll init error",
        "A resource is missing or a library is broken.",
        "Check the job's limits (ulimit -l and -n, size of /dev/shm), and that devices are passed into the container.",
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
