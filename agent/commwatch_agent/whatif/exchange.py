"""Changes of the exchange of gradients: bucket sizes, compression, accumulation, sharding in place of replication. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, count
from math import ceil
from typing import NamedTuple

from commwatch_agent.whatif.gradients import (
    NO_BUCKETS,
    SHARDED,
    SHARDED_ALREADY,
    WHOLE,
    WHOLE_ALREADY,
    Exchange,
    exchanges_of,
    has_buckets_of,
    is_repeated,
)
from commwatch_agent.whatif.model import (
    LAUNCHES,
    CannotAnswer,
    Do,
    Kind,
    Model,
    Op,
    Program,
    cost_s,
    first_steps,
    recosted,
)

#: Part of the compute before the only exchange that is the backward pass, if nothing shows when it begins.
_BACKWARD = 2 / 3
#: Most instructions of an accumulated model, and most buckets of a step.
_MOST_INSTRUCTIONS, _MOST_BUCKETS = 2_000_000, 1_000
#: Bytes of a value by dtype; all others have two.
_WIDTHS = {"float32": 4, "float64": 8, "torch.float32": 4, "torch.float64": 8}
#: Bytes of a value by form of compression.
FORMS = {"fp16": 2, "bf16": 2, "int8": 1}


class _At(NamedTuple):
    """An instruction to insert after so many seconds of a program's compute."""

    compute_s: float
    do: Do


# -- positions in the compute of a rank ------------------------------------------------------


def _places(program: Program, numbers: Sequence[int]) -> dict[int, float]:
    """Return after how many seconds of compute each of the operations is launched."""
    clock_s, found = 0.0, {}
    wanted = set(numbers)
    for do in program:
        if do.kind == Kind.COMPUTE:
            clock_s += do.seconds
        elif do.kind == Kind.LAUNCH and do.op in wanted:
            found[do.op] = clock_s
    return found


class _Backward(NamedTuple):
    """When gradients are there: bytes by seconds of compute."""

    #: When the forward pass before it began: after the backward pass before that, or with the step.
    forward_s: float
    begin_s: float
    #: For each recorded operation, its place and the bytes up to it.
    places_s: list[float]
    ends_bytes: list[float]
    #: Nothing shows when the backward pass began.
    guessed: bool

    def at_s(self, size_bytes: float) -> float:
        """Return after how many seconds of compute so many bytes of gradients are there."""
        before_s, before = self.begin_s, 0.0
        for place_s, end in zip(self.places_s, self.ends_bytes, strict=True):
            if size_bytes <= end:
                return before_s + (place_s - before_s) * (size_bytes - before) / max(1e-9, end - before)
            before_s, before = place_s, end
        return before_s


def _backward(program: Program, exchange: Exchange) -> _Backward:
    places = _places(program, [*exchange.after, *exchange.numbers])
    at = [places[number] for number in exchange.numbers]
    ends = exchange.ends_bytes
    per_byte = (at[-1] - at[0]) / (ends[-1] - ends[0]) if len(at) > 1 and ends[-1] > ends[0] else 0.0
    guessed = len(at) == 1
    forward_s = max((places[number] for number in exchange.after), default=0.0)
    begin_s = at[0] - (at[0] - forward_s) * _BACKWARD if guessed else max(forward_s, at[0] - per_byte * ends[0])
    return _Backward(forward_s, begin_s, at, ends, guessed)


def _rewrite(steps: list[Program], step: int, old: Sequence[int], inserts: Iterable[_At], waits: Sequence[Do]) -> None:
    """Put other operations in the places of those that a rank launches in a step, and ``waits`` in the place of the last wait for them."""
    removed, left = set(old), deque(sorted(inserts, key=lambda each: each.compute_s))
    _wait_instead(steps, step, removed, waits)
    program, out, clock_s = steps[step], list[Do](), 0.0
    launches = {place for place, do in enumerate(program) if do.kind in LAUNCHES and do.op in removed}
    for place, do in enumerate(program):
        if do.kind == Kind.COMPUTE:
            until_s = clock_s + do.seconds
            while left and left[0].compute_s <= until_s:
                out += [Do(Kind.COMPUTE, max(0.0, left[0].compute_s - clock_s)), left[0].do]
                clock_s = max(clock_s, left.popleft().compute_s)
            out.append(Do(Kind.COMPUTE, until_s - clock_s))
            clock_s = until_s
        elif place not in launches:
            out.append(do)
        elif place == max(launches):
            out += [each.do for each in left]
            left.clear()
    steps[step] = out


def _wait_instead(steps: list[Program], step: int, old: Collection[int], waits: Sequence[Do]) -> None:
    """Replace the last wait for operations that were launched in a step, and drop the others; the last one may be in a later step, or not recorded."""
    found: list[tuple[int, int]] = []
    for at in range(step, len(steps)):
        found += [(at, place) for place, do in enumerate(steps[at]) if do.kind == Kind.WAIT and do.op in old]
        if len(found) == len(old):
            break
    for at, place in reversed(found):
        instead = waits if (at, place) == found[-1] and len(found) == len(old) else ()
        steps[at] = [*steps[at][:place], *instead, *steps[at][place + 1 :]]


def _numbers(model: Model) -> Iterator[int]:
    return count(max(model.ops, default=0) + 1)


def _efficiency(model: Model, exchange: Exchange) -> float:
    """Return recorded over modelled time of an exchange, so that new operations are as good as the recorded ones."""
    modelled = sum(cost_s(model.curves[op.group], op) for op in exchange.ops)
    return sum(op.work_s * op.scale for op in exchange.ops) / modelled if modelled > 0 else 1.0


def _timed(model: Model, efficiency: float, op: Op) -> Op:
    """Return a new operation with the time that it takes."""
    return op._replace(work_s=efficiency * cost_s(model.curves[op.group], op), scale=1.0)


# -- changes -------------------------------------------------------------------------------------


def with_buckets(model: Model, bucket_bytes: float) -> Model:
    """Return the model with gradients in buckets of this size, in the order of the recorded ones; those that DDP makes of it stay as they are.

    Buckets of different backward passes stay apart.

    Raises:
        CannotAnswer: there is no exchange of gradients.
    """
    ops, numbers = dict(model.ops), _numbers(model)
    programs = {rank: list(steps) for rank, steps in model.programs.items()}
    guessed, kept, unnamed = False, False, False
    for step in range(len(model.measured_s)):
        for exchange in exchanges_of(model, step, "other bucket sizes", (WHOLE,), NO_BUCKETS):
            if has_buckets_of(exchange.ops, bucket_bytes):
                kept = True
                continue
            unnamed |= len(exchange.ops) > 1 and any(op.part is None for op in exchange.ops)
            total, efficiency = exchange.size_bytes, _efficiency(model, exchange)
            if total > _MOST_BUCKETS * bucket_bytes:
                raise CannotAnswer(
                    f"buckets: a step would have {ceil(total / bucket_bytes)} of them; at most {_MOST_BUCKETS} are replayed"
                )
            buckets = [min(bucket_bytes, total - at * bucket_bytes) for at in range(ceil(total / bucket_bytes))]
            if buckets == [op.size_bytes for op in exchange.ops]:
                continue
            made = [next(numbers) for _ in buckets]
            for number, size in zip(made, buckets, strict=True):
                ops[number] = _timed(model, efficiency, exchange.ops[0]._replace(size_bytes=size))
            for rank in exchange.ranks:
                program = model.programs[rank][step]
                backward = _backward(program, exchange)
                guessed |= backward.guessed and len(buckets) > 1
                blocking = _blocks(program, exchange.numbers)
                places = (backward.at_s(end) for end in accumulate(buckets))
                inserts = [
                    _At(place, each)
                    for place, number in zip(places, made, strict=True)
                    for each in _launched(number, blocking=blocking)
                ]
                at_end = [] if blocking else [Do(Kind.WAIT, op=number) for number in made]
                _rewrite(programs[rank], step, exchange.numbers, inserts, at_end)
    known = (
        *_guess(guessed=guessed),
        *(["the recorded buckets are as DDP makes them of this size: by default, its first one is smaller"] * kept),
        *(["nothing names the buckets: those of a step count as those of one backward pass"] * unnamed),
    )
    return replace(model, ops=ops, programs=programs, assumed=(*model.assumed, *known))


def _launched(number: int, *, blocking: bool) -> list[Do]:
    return [Do(Kind.LAUNCH, op=number), *([Do(Kind.WAIT, op=number)] if blocking else [])]


def _blocks(program: Program, numbers: Sequence[int]) -> bool:
    """Return whether the thread is blocked in each of the operations from its launch on."""
    wanted = set(numbers)
    launches = [place for place, do in enumerate(program) if do.kind == Kind.LAUNCH and do.op in wanted]
    return all(
        place + 1 < len(program) and program[place + 1] == Do(Kind.WAIT, op=program[place].op) for place in launches
    )


def _guess(*, guessed: bool) -> Iterator[str]:
    if guessed:
        yield "the step has only one exchange of gradients: two thirds of the compute before it count as the backward pass"


def compressed(model: Model, form: str | float, seconds_per_byte: float = 0.0) -> Model:
    """Return the model with compressed gradients.

    Args:
        form: ``fp16``, ``bf16`` or ``int8``, or the part of the bytes that is left.
        seconds_per_byte: compute for packing and unpacking, each, by byte before compression.

    Raises:
        CannotAnswer: there is no exchange of gradients.
    """
    exchanged = {
        number
        for step in range(len(model.measured_s))
        for each in exchanges_of(model, step, "compression")
        for number in each.numbers
    }
    ops = dict(model.ops)
    for number in exchanged:
        op = ops[number]
        part = FORMS[form] / _WIDTHS.get(op.dtype or "float32", 2) if isinstance(form, str) else form
        ops[number] = recosted(model, op, size_bytes=op.size_bytes * min(1.0, part))

    def packed(program: Program) -> Iterator[Do]:
        for do in program:
            cost = Do(Kind.COMPUTE, seconds_per_byte * model.ops[do.op].size_bytes) if do.op in exchanged else None
            if cost is not None and do.kind != Kind.WAIT:
                yield cost
            yield do
            if cost is not None and do.kind == Kind.WAIT:
                yield cost

    programs = {rank: [list(packed(program)) for program in steps] for rank, steps in model.programs.items()}
    free = () if seconds_per_byte else ("compression itself takes no time",)
    return replace(model, ops=ops, programs=programs, assumed=(*model.assumed, *free))


def accumulated(model: Model, micro_steps: int) -> Model:
    """Return the model with so many micro-steps for each exchange of gradients; everything else happens in each of them.

    Raises:
        CannotAnswer: there is no exchange of gradients, steps exchange some more than once, or the ranks do not show which operations are those of a
            micro-step.
    """
    model = first_steps(model, _MOST_INSTRUCTIONS // micro_steps)
    ops, numbers = dict(model.ops), _numbers(model)
    copies: dict[tuple[int, int], int] = {}
    programs: dict[int, list[Program]] = {}
    exchanged = [
        {number for each in exchanges_of(model, step, "accumulation") for number in each.numbers}
        for step in range(len(model.measured_s))
    ]
    if any(is_repeated(model, of_step) for of_step in exchanged):
        raise CannotAnswer(
            "accumulation: a step exchanges the same gradients more than once, so it has several micro-steps already; if the optimizer needs only their "
            "sum, exchange them in the last one"
        )
    launches, repeats = Counter[int](), Counter[int]()

    def copied(do: Do, micro_step: int) -> Do:
        if do.op < 0:
            return do
        number = copies.get((do.op, micro_step))
        if number is None:
            number = copies[do.op, micro_step] = next(numbers)
            ops[number] = model.ops[do.op]
        return do._replace(op=number)

    for rank, steps in model.programs.items():
        programs[rank] = []
        for gradients, program in zip(exchanged, steps, strict=True):
            end = max((place for place, do in enumerate(program) if do.op in gradients), default=-1) + 1
            head, tail = program[:end], program[end:]
            launched = {do.op for do in head if do.kind in LAUNCHES} - gradients
            repeats.update(launched)
            launches.update(do.op for do in program if do.kind in LAUNCHES)
            # What another step launched is waited for once.
            quiet = [do for do in head if do.op < 0 or do.op in launched]
            repeated = [copied(do, at) for at in range(micro_steps - 1) for do in quiet]
            programs[rank].append([*repeated, *head, *tail])
    if any(launches[op] != count for op, count in repeats.items()):
        raise CannotAnswer(
            "accumulation: some ranks launch an operation before their exchange of gradients, and others after it or without one, so nothing "
            "shows whether each micro-step has it"
        )
    return replace(model, ops=ops, programs=programs, samples=model.samples * micro_steps)


def sharded(model: Model) -> Model:
    """Return the model with FSDP in place of DDP: a unit for each bucket, whose parameters are gathered in the forward and in the backward pass.

    Blocking on the CPU, as FSDP2 is there; on a GPU, gathered one unit ahead.

    Raises:
        CannotAnswer: gradients are not reduced whole.
    """
    ops, numbers = dict(model.ops), _numbers(model)
    programs = {rank: list(steps) for rank, steps in model.programs.items()}
    guessed = False
    for step in range(len(model.measured_s)):
        for exchange in exchanges_of(model, step, "sharding", (WHOLE,), SHARDED_ALREADY):
            efficiency = _efficiency(model, exchange)
            made = {
                (what, unit): next(numbers)
                for unit in range(len(exchange.ops))
                for what in ("forward", "backward", "reduce")
            }
            for (what, unit), number in made.items():
                op, carries = ("reduce_scatter", "gradients") if what == "reduce" else ("all_gather", "parameters")
                ops[number] = _timed(model, efficiency, exchange.ops[unit]._replace(op=op, carries=carries))
            for rank in exchange.ranks:
                backward = _backward(model.programs[rank][step], exchange)
                guessed |= backward.guessed
                overlaps = exchange.ops[0].on_device
                inserts = _sharded_units(backward, made, overlaps=overlaps)
                waits = [Do(Kind.WAIT, op=made["reduce", unit]) for unit in range(len(exchange.ops)) if overlaps]
                _rewrite(programs[rank], step, exchange.numbers, inserts, waits)
    return replace(model, ops=ops, programs=programs, assumed=(*model.assumed, *_guess(guessed=guessed)))


def _sharded_units(backward: _Backward, made: Mapping[tuple[str, int], int], *, overlaps: bool) -> list[_At]:
    """Return what the units of FSDP do in a step; the first unit of the backward pass is the last of the forward pass."""
    units, total = len(backward.ends_bytes), max(1e-9, backward.ends_bytes[-1])
    forward_s, begin_s = backward.forward_s, backward.begin_s
    out: list[_At] = []
    forward = [
        forward_s + (begin_s - forward_s) * (1 - backward.ends_bytes[unit] / total) for unit in reversed(range(units))
    ]
    order = [made["forward", unit] for unit in reversed(range(units))]
    out += _gathers(order, forward, overlaps=overlaps)
    back = [begin_s, *backward.places_s[:-1]]
    ahead = [back[0], *back[:-1]]  # also on the CPU, FSDP2 gathers the next unit in the backward pass early
    for unit in range(units):
        launch, wait = Do(Kind.LAUNCH, op=made["backward", unit]), Do(Kind.WAIT, op=made["backward", unit])
        out += [_At(ahead[unit], launch), _At(back[unit] if overlaps else ahead[unit], wait)]
        reduce = made["reduce", unit]
        out += [_At(backward.places_s[unit], do) for do in _launched(reduce, blocking=not overlaps)]
    return out


def _gathers(order: Sequence[int], places_s: Sequence[float], *, overlaps: bool) -> Iterator[_At]:
    """Yield the gathers of the forward pass: on a GPU, one unit ahead."""
    ahead = [places_s[0], *places_s[:-1]] if overlaps else places_s
    for number, at_s, launch_s in zip(order, places_s, ahead, strict=True):
        yield _At(launch_s, Do(Kind.LAUNCH, op=number))
        yield _At(at_s, Do(Kind.WAIT, op=number))


def replicated(model: Model) -> Model:
    """Return the model with DDP in place of FSDP: no parameters are gathered, gradients are reduced whole beside the backward pass.

    Raises:
        CannotAnswer: gradients are not sharded.
    """
    ops = dict(model.ops)
    gathers = {number for number, op in model.ops.items() if op.carries == "parameters"}
    programs = {
        rank: [[do for do in program if do.op not in gathers] for program in steps]
        for rank, steps in model.programs.items()
    }
    for step in range(len(model.measured_s)):
        for exchange in exchanges_of(model, step, "replication", (SHARDED,), WHOLE_ALREADY):
            for number, op in zip(exchange.numbers, exchange.ops, strict=True):
                whole = op._replace(op="all_reduce")
                curve = model.curves[op.group]
                before, after = cost_s(curve, op), cost_s(curve, whole)
                ops[number] = whole._replace(scale=op.scale * (after / before if before > 0 else 1.0))
            for rank in exchange.ranks:
                places = _places(programs[rank][step], exchange.numbers)
                inserts = [_At(places[number], Do(Kind.LAUNCH, op=number)) for number in exchange.numbers]
                waits = [Do(Kind.WAIT, op=number) for number in exchange.numbers]
                _rewrite(programs[rank], step, exchange.numbers, inserts, waits)
    return replace(model, ops=ops, programs=programs)
