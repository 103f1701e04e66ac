"""The form of an entry of the vocabulary, and the classes of warnings."""

from __future__ import annotations

from typing import NamedTuple


class Words(NamedTuple):
    """Warnings that one remedy mends."""

    #: The class, a key of ``KINDS``.
    kind: str
    #: A regular expression that is searched in the warning's text. Its repetitions are bounded.
    pattern: str
    #: What it means for the job.
    means: str
    #: The remedy of this cause, and what a switch costs.
    do: str
    #: The severity where neither a failed call nor an exception follows the warning: ``error``, ``warning`` or ``info``.
    alone: str = "warning"
    #: A regular expression that is searched in the origin, where the words alone are ambiguous.
    file: str = ""
    #: The remedy is to do nothing, which is wrong under an error.
    is_harmless: bool = False
    #: It is no cause, also if a call failed: the cause is elsewhere.
    is_consequence: bool = False


#: Class -> title.
KINDS: dict[str, str] = {
    "version_mismatch": "ranks have different NCCL versions",
    "connection_refused": "a connection could not be made",
    "ib_completion_error": "a transfer over InfiniBand or RoCE failed",
    "ib_async_event": "a network card reported a fault",
    "cuda_error": "CUDA or HIP failed",
    "duplicate_gpu": "two ranks use one GPU",
    "mismatch": "ranks call different collectives or sizes",
    "system_error": "a system or library call failed",
    "timeout": "NCCL or a plug-in timed out",
    "nvlink_sharp": "NVLink SHARP or NVLink between nodes could not be set up",
    "shm": "shared memory could not be set up",
    "peer_to_peer": "GPUs cannot access each other's memory",
    "network_plugin": "a network plug-in failed",
    "memory_registration": "memory could not be registered",
    "topology": "NCCL could not use the topology of the machine",
    "bootstrap": "ranks could not find each other at the start",
    "setting": "a setting is invalid",
    "invalid_usage": "a wrong use of NCCL",
    "internal": "NCCL's own state is broken",
    "consequence": "a consequence of an earlier failure",
    "other": "a warning of NCCL",
}
