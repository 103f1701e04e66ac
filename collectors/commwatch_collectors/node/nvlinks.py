"""The single NVLinks of a card: what each carries and its errors, as the driver counts them. Pure but for the calls that are passed in.

Source: nvml.h, ``nvmlDeviceGetNvLinkState``, and ``nvmlFieldValue_t``: of the fields of NVLink, ``scopeId`` is the number of the link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

#: NVLINK_LINK_COUNT, of the card.
COUNT = (91, 0)
#: Most links of a card that are read.
_MOST_LINKS = 36
#: What a link carries and its errors: candidates (field id, factor) of each value, of which the first is used that the card supports. 138, 139:
#: NVLINK_THROUGHPUT_DATA_TX/RX, in KiB. 202, 204: NVLINK_COUNT_XMIT/RCV_BYTES. 161 to 163: NVLINK_ERROR_DL_{REPLAY,RECOVERY,CRC}. 208, 215:
#: NVLINK_COUNT_RCV_ERRORS, NVLINK_COUNT_LINK_RECOVERY_EVENTS.
_BYTES = {"transmit": ((138, 1024), (202, 1)), "receive": ((139, 1024), (204, 1))}
_ERRORS = {"crc": ((163, 1),), "replay": ((161, 1),), "recovery": ((162, 1), (215, 1)), "receive": ((208, 1),)}


@dataclass(frozen=True)
class NvLink:
    """One link of a card; what the card does not count is missing."""

    number: int
    #: ``None``: not known.
    up: bool | None
    #: Payload by ``receive`` and ``transmit``, from the card's point of view.
    bytes: Mapping[str, int] = field(default_factory=dict)
    #: By kind of error, as of ``Measured.nvlink_errors``.
    errors: Mapping[str, int] = field(default_factory=dict)


def read_links(
    values: Callable[[Sequence[tuple[int, int]]], Sequence[int | None]], state: Callable[[int], int | None]
) -> tuple[NvLink, ...]:
    """Return the links of a card; none if it has none, or does not know their number.

    Args:
        values: returns field values, given pairs of field id and scope; ``None``: the card does not give one.
        state: returns 1 for a link that is up, else 0; ``None``: not known.
    """
    (count,) = values([COUNT])
    numbers = range(min(count or 0, _MOST_LINKS))
    wanted = [
        (key, name, factor, number, identity)
        for number in numbers
        for key, names in (("bytes", _BYTES), ("errors", _ERRORS))
        for name, candidates in names.items()
        for identity, factor in candidates
    ]
    found: dict[tuple[int, str], dict[str, int]] = {}
    answers = values([(identity, number) for *_, number, identity in wanted]) if wanted else ()
    for (key, name, factor, number, _), value in zip(wanted, answers, strict=False):
        if value is not None:
            found.setdefault((number, key), {}).setdefault(name, value * factor)
    return tuple(
        NvLink(number, _is_up(state(number)), found.get((number, "bytes"), {}), found.get((number, "errors"), {}))
        for number in numbers
    )


def _is_up(state: int | None) -> bool | None:
    return None if state is None else state == 1
