"""Meanings of the commonest Xids: errors that the NVIDIA driver reports by number.

Source: NVIDIA, "Xid Errors", the catalogue at https://docs.nvidia.com/deploy/xid-errors/.
"""

from __future__ import annotations

from typing import NamedTuple

_PROGRAM = "check the program first: it used an illegal address, or a kernel failed"
_RESET = "end the jobs on this GPU and reset it (nvidia-smi --gpu-reset), or reboot the node"
_DRAIN = "take the node out of service and reboot it; if the fault recurs, have the GPU and its slot inspected"
_LINK = "check nvidia-smi nvlink -e and the fabric manager's log, and reset the GPU; if the fault recurs, have the link inspected"
_FOLLOWS = "find the error that occurred before: this one is a consequence"
_NOTE = "nothing now: faulty memory was retired, which takes effect at the next reset of the GPU"


class Meaning(NamedTuple):
    """Meaning of an Xid, and what to do."""

    title: str
    do: str


XIDS = {
    13: Meaning("exception in the compute engine", _PROGRAM),
    31: Meaning("access to an address that is not mapped", _PROGRAM),
    43: Meaning("a program's work was stopped after an error of the program", _PROGRAM),
    45: Meaning("a program's work was removed from the GPU", _FOLLOWS),
    48: Meaning("memory error that ECC could not correct", _RESET),
    62: Meaning("the GPU's own microcontroller has halted", _RESET),
    63: Meaning("faulty memory was retired", _NOTE),
    64: Meaning("faulty memory could not be retired", _DRAIN),
    69: Meaning("the compute engine received an unknown command", _PROGRAM),
    74: Meaning("NVLink error", _LINK),
    79: Meaning("the GPU has fallen off the bus", _DRAIN),
    92: Meaning("many memory errors that ECC corrected", _DRAIN),
    94: Meaning(
        "memory error that ECC could not correct, contained to one program", "start the job again; reset the GPU"
    ),
    95: Meaning("memory error that ECC could not correct, and that may affect any program", _RESET),
    109: Meaning("a switch between programs took too long", _PROGRAM),
    119: Meaning("the GPU's system processor does not answer", _RESET),
    120: Meaning("error in the GPU's system processor", _RESET),
    121: Meaning("error on the link between CPU and GPU", _RESET),
    137: Meaning("access over NVLink that was not allowed", _PROGRAM),
    140: Meaning("memory error that ECC could not correct", _RESET),
    143: Meaning("the GPU could not be initialised", _DRAIN),
    144: Meaning("NVLink error", _LINK),
    145: Meaning("NVLink error", _LINK),
    146: Meaning("NVLink error", _LINK),
    147: Meaning("NVLink error", _LINK),
    148: Meaning("NVLink error", _LINK),
    149: Meaning("NVLink error", _LINK),
    150: Meaning("NVLink error", _LINK),
    154: Meaning("the recovery action requested by the driver has changed", "nvidia-smi -q shows the requested action"),
}
_OTHER = Meaning("see NVIDIA's catalogue of Xids", "look it up at docs.nvidia.com/deploy/xid-errors")


def meaning(number: int) -> Meaning:
    """Return the meaning of an Xid; for one that is not in the table, where to look it up."""
    return XIDS.get(number, _OTHER)
