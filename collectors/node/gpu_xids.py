"""Meanings of the commonest Xids: errors that the NVIDIA driver reports by number.

Source: NVIDIA, "Xid Errors", the catalogue at https://docs.nvidia.com/deploy/xid-errors/.
"""

from __future__ import annotations

from typing import NamedTuple

_PROGRAM = "look at the program first: an illegal address, or a kernel that went wrong"
_RESET = "end the jobs on this card and reset it (nvidia-smi --gpu-reset), or reboot the node"
_DRAIN = "take the node out of service: reboot it, and have the card and its seat looked at if that comes again"
_LINK = "look at nvidia-smi nvlink -e and the fabric manager's log; reset the card, have the link looked at if that comes again"
_FOLLOWS = "look for the error before it: this one only follows"
_NOTE = "nothing now: a bad piece of memory was put out of use; a reset of the card makes that take effect"


class Meaning(NamedTuple):
    """Meaning of an Xid, and what to do."""

    title: str
    do: str


XIDS = {
    13: Meaning("exception in the compute engine", _PROGRAM),
    31: Meaning("access to an address that is not mapped", _PROGRAM),
    43: Meaning("a program's work was stopped after an error of its own", _PROGRAM),
    45: Meaning("a program's work was cleared away", _FOLLOWS),
    48: Meaning("memory error that ECC could not correct", _RESET),
    62: Meaning("the card's own microcontroller has halted", _RESET),
    63: Meaning("a piece of memory was put out of use", _NOTE),
    64: Meaning("a bad piece of memory could not be put out of use", _DRAIN),
    69: Meaning("the compute engine was given a command it does not know", _PROGRAM),
    74: Meaning("NVLink error", _LINK),
    79: Meaning("the card has fallen off the bus", _DRAIN),
    92: Meaning("many memory errors that ECC corrects", _DRAIN),
    94: Meaning(
        "memory error that ECC could not correct, contained to one program", "start the job again; reset the card"
    ),
    95: Meaning("memory error that ECC could not correct, and that may have hit any program", _RESET),
    109: Meaning("a change between programs took too long", _PROGRAM),
    119: Meaning("the card's system processor does not answer", _RESET),
    120: Meaning("error in the card's system processor", _RESET),
    121: Meaning("error on the link between CPU and card", _RESET),
    137: Meaning("access over NVLink that was not allowed", _PROGRAM),
    140: Meaning("memory error that ECC could not correct", _RESET),
    143: Meaning("the card could not be brought up", _DRAIN),
    144: Meaning("NVLink error", _LINK),
    145: Meaning("NVLink error", _LINK),
    146: Meaning("NVLink error", _LINK),
    147: Meaning("NVLink error", _LINK),
    148: Meaning("NVLink error", _LINK),
    149: Meaning("NVLink error", _LINK),
    150: Meaning("NVLink error", _LINK),
    154: Meaning("what the driver asks for to recover has changed", "nvidia-smi -q says which action it asks for"),
}
_OTHER = Meaning("see NVIDIA's catalogue of Xids", "look it up at docs.nvidia.com/deploy/xid-errors")


def meaning(number: int) -> Meaning:
    """Return the meaning of an Xid; for one that is not in the table, where to look it up."""
    return XIDS.get(number, _OTHER)
