"""What people ask for, and the changes that follow from it. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from commwatch_agent.model.alpha_beta import Curve
from commwatch_agent.reference.links import UnknownLink, find
from commwatch_agent.text.units import counted, size
from commwatch_agent.whatif import changes, exchange
from commwatch_agent.whatif.changes import Change
from commwatch_agent.whatif.model import CannotAnswer

#: Most ranks of a forecast, and of a question.
MOST_RANKS = 1_048_576
_MOST_MICRO_STEPS = 64
_FACTOR = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*x")
_OF_RANK = re.compile(r"(\d{1,9})=(.+)")
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(B|kB|KB|MB|GB|KiB|MiB|GiB)")
_UNITS = {"B": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class BadQuestion(CannotAnswer):
    """A part of a question is wrong; the text names it and a correct value."""


@dataclass(frozen=True)
class Question:
    """What to change in a job; the fields are named as the flags of ``commwatch whatif`` and the parameters of ``/api/v1/whatif``."""

    #: ``2x``: twice the bandwidth; or a link of the catalogue, such as ``ib-ndr`` or ``8 x ib-ndr``; or a measured reference.
    link: str | None = None
    #: ``0.5x``: half the latency of a message.
    latency: str | None = None
    #: Label of the only group on the link; ``None``: all groups that span hosts, or all groups if none does.
    group: str | None = None
    no_late: bool = False
    #: Only these ranks are no longer late.
    no_late_rank: tuple[int, ...] = ()
    #: ``0.5x``: half the time for all ranks; ``3=0.5x``: for rank 3.
    compute: tuple[str, ...] = ()
    buckets: str | None = None
    #: ``fp16``, ``bf16``, ``int8``, or the part of the bytes that is left, such as ``0.25``.
    compress: str | None = None
    #: Compute for packing 1 GB (10^9 bytes) of gradients, and for unpacking it, in seconds.
    compress_cost: float = 0.0
    accumulate: int | None = None
    ranks: int | None = None
    shard: bool = False
    replicate: bool = False


def changes_of(question: Question, measured: Mapping[str, Curve]) -> Mapping[str, Change]:
    """Return the changes of a question by their texts, in the order in which they apply.

    Args:
        measured: curves of measured references, by name.

    Raises:
        BadQuestion: a part of it is wrong.
    """
    if question.shard and question.replicate:
        raise BadQuestion("shard, replicate: choose one of them")
    if question.compress_cost and question.compress is None:
        raise BadQuestion("compress-cost: needs compress")
    return dict((*_of_compute(question), *_of_exchange(question), *_of_link(question, measured)))


def _of_compute(question: Question) -> Iterator[tuple[str, Change]]:
    late = question.no_late_rank
    if question.no_late or late:
        of = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}" if late else "any rank"
        yield f"without lateness of {of}", partial(changes.without_lateness, ranks=late)
    for text in question.compute:
        of_rank = _OF_RANK.fullmatch(text)
        rank = int(of_rank[1]) if of_rank else None
        factor = _factor("compute", of_rank[2] if of_rank else text, "0.5x, or 3=0.5x for rank 3")
        who = "" if rank is None else f" of rank {rank}"
        yield f"compute{who} takes {factor:g} times as long", partial(changes.scaled_compute, factor=factor, rank=rank)


def _of_exchange(question: Question) -> Iterator[tuple[str, Change]]:
    if question.replicate:
        yield "replicated instead of sharded", exchange.replicated
    if question.shard:
        yield "sharded instead of replicated", exchange.sharded
    if question.buckets is not None:
        of = _size(question.buckets)
        yield f"buckets of {size(of)}", partial(exchange.with_buckets, bucket_bytes=of)
    if question.compress is not None:
        form = _form(question.compress)
        cost = question.compress_cost
        if not 0 <= cost < 1e6:
            raise BadQuestion(f"compress-cost: {cost:g}: give seconds for 1 GB, such as 0.5")
        yield (
            f"gradients compressed: {question.compress}",
            partial(exchange.compressed, form=form, seconds_per_byte=cost / 1e9),
        )
    if question.accumulate is not None:
        if not 1 <= question.accumulate <= _MOST_MICRO_STEPS:
            raise BadQuestion(
                f"accumulate: {question.accumulate}: give a number of micro-steps from 1 to {_MOST_MICRO_STEPS}"
            )
        yield (
            f"gradients accumulated over {question.accumulate} micro-steps",
            partial(exchange.accumulated, micro_steps=question.accumulate),
        )


def _of_link(question: Question, measured: Mapping[str, Curve]) -> Iterator[tuple[str, Change]]:
    if question.ranks is not None:
        if not 1 <= question.ranks <= MOST_RANKS:
            raise BadQuestion(f"ranks: {question.ranks}: give a number from 1 to {MOST_RANKS}")
        yield counted(question.ranks, "rank"), partial(changes.with_ranks, ranks=question.ranks)
    on = "" if question.group is None else f" of group {question.group}"
    if question.link is not None:
        matched = _FACTOR.fullmatch(question.link)
        if matched:
            factor = _factor("link", question.link, "2x")
            yield f"{factor:g} times the bandwidth{on}", changes.with_bandwidth(factor, question.group)
        else:
            yield (
                f"link {question.link}{on}",
                partial(changes.other_link, of=_of(question.link, measured), group=question.group),
            )
    if question.latency is not None:
        factor = _factor("latency", question.latency, "0.5x")
        yield f"{factor:g} times the latency{on}", partial(changes.with_latency, factor=factor, group=question.group)
    if question.group is not None and question.link is None and question.latency is None:
        raise BadQuestion(f"group: {question.group}: give link or latency, too; the group is the one on that link")


def _of(text: str, measured: Mapping[str, Curve]) -> Callable[[Curve], Curve]:
    """Return a function that returns the curve of a link for any other curve."""
    try:
        curve = measured[text] if text in measured else find(text).curve()
    except UnknownLink as error:
        known = "".join(f", {name}" for name in measured)
        raise BadQuestion(f"link: {error}{known}, or a factor such as 2x") from None
    return lambda _: curve


def _factor(name: str, text: str, example: str) -> float:
    matched = _FACTOR.fullmatch(text)
    if matched is None or float(matched[1]) == 0:
        raise BadQuestion(f"{name}: {text}: give a factor above 0, such as {example}")
    return float(matched[1])


def _size(text: str) -> float:
    matched = _SIZE.fullmatch(text)
    size = float(matched[1]) * _UNITS[matched[2]] if matched else 0.0
    if size < 1 << 10:
        raise BadQuestion(f"buckets: {text}: give a size of at least 1 KiB, such as 25MB or 25MiB")
    return size


def _form(text: str) -> str | float:
    if text in exchange.FORMS:
        return text
    try:
        part = float(text)
    except ValueError:
        part = 0.0
    if not 0 < part <= 1:
        raise BadQuestion(
            f"compress: {text}: give {', '.join(exchange.FORMS)}, or the part of the bytes that is left, such as 0.25"
        )
    return part
