"""Advice and its expected gain: rules over shares, waits, efficiency and NCCL's findings. Pure.

Every advice names the numbers that led to it. Its gain is the share of step time that it would save by the α-β model: an
upper bound if it is not known how much communication is hidden behind compute. ``whatif/advised.py`` puts predictions in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import ceil
from typing import NamedTuple

from commwatch.wire.events import P2P
from commwatch_agent.analysis import framework_settings
from commwatch_agent.analysis.advice_facts import (
    BOTTLENECK_SHARE,
    CORES_RULE,
    ERROR_RULE,
    FIRST_RULES,
    LATE_RULE,
    LEAST_GAIN,
    UP_TO,
    WORTH,
    Facts,
    Found,
    Kind,
)
from commwatch_agent.analysis.framework_settings import FORMS
from commwatch_agent.analysis.nccl_operations import WHY_SLOW, SlowChoice, slow_choices
from commwatch_agent.analysis.network_advice import Network, NetworkFinding, complaints, far_from_nic
from commwatch_agent.analysis.waits.waiting_advice import first_of, late_ranks, pausing_rank, scarce_cores, uneven_ranks
from commwatch_agent.ingest.why_late import SCARCE_CORES
from commwatch_agent.model.alpha_beta import messages
from commwatch_agent.model.api_views import Advice, Remedy
from commwatch_agent.model.bandwidth import bus_factor
from commwatch_agent.model.nccl_views import NcclOperations
from commwatch_agent.reference.efficiency import BELOW_THE_LINK
from commwatch_agent.reference.references import INCONCLUSIVE
from commwatch_agent.text.units import percent, rate, seconds, size

#: Three quarters of what accumulating gradients can save; more steps save little more, and make the batch larger.
_MOST_MICRO_STEPS = 4
_GLOO_LINK = "Look for a wrong interface (`GLOO_SOCKET_IFNAME`), for link errors and for other traffic on the link."
#: A bucket is large enough if its bytes take 9 times as long as its latency, which is then a tenth of the time.
_PER_LATENCY = 9
_WIDE = {"float32": 4, "float64": 8}
#: Findings on what Ctrl-C does to the ranks.
_OF_CTRL_C = frozenset({"gloo_peer_lost", "process_failed"})
#: Efficiency that a healthy link reaches.
_GOOD = 0.9


class Rule(NamedTuple):
    """One kind of advice."""

    name: str
    title: str
    do: str
    check: Callable[[Facts], Iterable[Found]]


def _about(facts: Facts, kind: Kind) -> list[str]:
    """Return how much of a step communication and the operations of a kind take; waiting for late ranks is not in it."""
    share = percent(facts.of_step(kind.seconds / facts.step_s))
    exposed = "not known" if facts.exposed is None else percent(facts.of_step(facts.exposed))
    beside = f", beside {percent(facts.left_out)} of waiting for late ranks" if facts.left_out else ""
    return [
        f"{_named(facts)} takes {percent(facts.of_step(facts.comm))} of a step (exposed: {exposed}){beside}",
        f"{kind.named()}: {share} of a step, {kind.per_step:.3g} per step of {size(kind.size_bytes)} each",
    ]


def _named(facts: Facts) -> str:
    """Return what the communication share of the facts is of, in the words of ``headline.split``."""
    return "transfer" if facts.left_out else "communication"


def _and_waiting(facts: Facts) -> str:
    """Return what fewer exchanges save beside their transfer: waiting stays if one rank is always late, and becomes less if each is late in turn."""
    return f", and perhaps part of the waiting ({percent(facts.left_out)})" if facts.left_out >= WORTH else ""


# -- rules --------------------------------------------------------------------------------------


def _exchange_once(facts: Facts) -> Iterator[Found]:
    kind = max((kind for kind in facts.kinds if kind.repeat.passes > 1), key=lambda kind: kind.seconds, default=None)
    if kind is not None:
        saves = facts.saves(kind.seconds * kind.repeat.again)
        passes = f"each step has {kind.repeat.passes} backward passes, and each of them exchanges the same gradients"
        gain = f"exchanging them only in the last one would save {UP_TO}{percent(saves)} of a step{_and_waiting(facts)}"
        yield Found([*_about(facts, kind), passes], gain, saves, kind.knob("exchange_once"))


def _accumulate(facts: Facts) -> Iterator[Found]:
    kind = facts.gradients
    if kind is None or kind.repeat.passes > 1 or facts.comm <= BOTTLENECK_SHARE or facts.visible * facts.comm <= WORTH:
        return
    exchange = min(facts.comm, kind.seconds / facts.step_s)
    # Of an exchange, only the exposed part takes time: k micro-steps take k times the rest of the step, and that part once.
    other, exposed = facts.comm - exchange, exchange * facts.visible
    rest = 1 - exposed
    # From this k on the share is below the limit L.
    room = BOTTLENECK_SHARE * rest - other
    needed = ceil((exchange - BOTTLENECK_SHARE * exposed) / room) if room > 0 else None
    if needed is not None and needed <= 1:
        return
    steps = min(needed or _MOST_MICRO_STEPS, _MOST_MICRO_STEPS)
    saves = facts.of_step(exposed * (1 - 1 / steps))
    before, after = facts.of_step(facts.comm), facts.of_step(other + exchange / steps) / (1 - saves)
    above = f", which is still above {percent(BOTTLENECK_SHARE)}," if after > BOTTLENECK_SHARE + 1e-9 else ""
    gain = f"accumulating over {steps} steps reduces {_named(facts)} from {percent(before)} to {percent(after)}{above}"
    yield Found(
        _about(facts, kind),
        f"{gain} and saves {UP_TO}{percent(saves)} of the time per sample{_and_waiting(facts)}",
        saves,
        kind.knob("accumulate_gradients"),
        remedies=[Remedy("", {"accumulate": steps}, saves)],
    )


def _keep_parameters(facts: Facts) -> Iterator[Found]:
    for kind in facts.kinds if facts.visible * facts.comm > WORTH else ():
        again = kind.repeat.again if kind.op == "all_gather" else 0.0
        if again:
            saves = facts.saves(kind.seconds * again)
            part = f"{percent(again)} of the gathered bytes are units that the forward pass has gathered already"
            gain = f"keeping them would save {UP_TO}{percent(saves)} of a step{_and_waiting(facts)}"
            yield Found([*_about(facts, kind), part], gain, saves)


def _larger_buckets(facts: Facts) -> Iterator[Found]:
    for kind in facts.kinds:
        latency, factor = kind.latency_s, bus_factor(kind.op, kind.group_size)
        if kind.curve is None or latency is None or not factor or kind.curve.beta_s == 0 or kind.per_step < 2:
            continue
        # Once latency is a tenth of the time, larger buckets gain little.
        good = _PER_LATENCY * messages(kind.op, kind.group_size) * kind.curve.alpha_s / (factor * kind.curve.beta_s)
        total, passes = kind.per_step * kind.size_bytes, kind.repeat.passes
        count = passes * max(1, ceil(total / passes / good)) if good > 0 else kind.per_step
        saved = latency * (1 - count / kind.per_step)
        if kind.size_bytes >= good or facts.saves(saved) < LEAST_GAIN:
            continue
        because = [
            *_about(facts, kind),
            f"latency is {percent(latency / kind.seconds)} of their time (α-β model)",
        ]
        saves = facts.saves(saved)
        gain = f"{count} per step of {size(total / count)} each would save {UP_TO}{percent(saves)} of a step"
        # The replay changes all buckets of gradients, so it can only predict this for the one exchange of a job.
        alone = kind.role == framework_settings.REPLICATED and sum(other.gradients for other in facts.kinds) == 1
        buckets = [Remedy("", {"buckets": f"{total / count:.0f}B"}, saves)] if alone and kind.op == "all_reduce" else []
        yield Found(because, gain, saves, kind.knob("larger_buckets"), remedies=buckets)


def _overlap(facts: Facts) -> Iterator[Found]:
    # Waiting for a message cannot be hidden; ``micro_batches`` is about it.
    messages = (facts.bubble or 0.0) / (1 - facts.left_out)
    exposed, comm = facts.exposed and facts.exposed - messages, facts.comm - messages
    kinds = [kind for kind in facts.kinds if kind.op not in P2P or not messages]
    if exposed is None or exposed <= 0.7 * comm or comm <= WORTH or not kinds:
        return
    kind = max(kinds, key=lambda kind: kind.seconds)
    # Behind the last operation of a step no compute is left to hide it.
    saves = facts.of_step(min(exposed, 1 - facts.comm) * (1 - 1 / max(1.0, kind.per_step)))
    yield Found(
        _about(facts, kind),
        f"hiding it behind compute would save {UP_TO}{percent(saves)} of a step",
        saves,
        kind.knob("overlap"),
    )


def _tensor_in_node(facts: Facts) -> Iterator[Found]:
    ranks_here = max((kind.local for kind in facts.kinds), default=0)
    for kind in facts.kinds:
        share = kind.seconds / facts.step_s
        if (
            not framework_settings.is_tensor(kind.group)
            or not kind.spans_nodes
            or share < WORTH
            or kind.group_size > ranks_here
        ):
            continue
        near = next((other.curve for other in facts.kinds if other.curve is not None and not other.spans_nodes), None)
        time = None if near is None else near.time_s(kind.op, kind.group_size, kind.size_bytes)
        because = [*_about(facts, kind), f"no more than {kind.local} of its {kind.group_size} ranks are on one node"]
        if time is None:
            yield Found(because, "gain not known; there is no group within the node to compare with", None)
            continue
        saves = facts.saves(max(0.0, kind.seconds - kind.per_step * time))
        if saves >= LEAST_GAIN:
            gain = f"the speed of the node's own links would save {UP_TO}{percent(saves)} of a step"
            yield Found(because, gain, saves)


def _compression(facts: Facts) -> Iterator[Found]:
    kind = facts.gradients
    if kind is None or kind.dtype is None or facts.comm <= BOTTLENECK_SHARE or facts.visible * facts.comm <= WORTH:
        return
    width = _WIDE.get(kind.dtype, 2)
    do = kind.knob("compression" if width > 2 else "further_compression")
    if width == 2 and not do:
        return  # its framework has no setting for that
    transport = kind.transport_s
    # Top-k with 1% keeps values and 4-byte indices, and has to gather them from every rank.
    kept = min(1.0, 0.01 * (width + 4) / width * kind.group_size / 2)
    possible = kind.compressions(width)
    every = [
        Remedy(name, {"compress": f"{part:.6g}"}, facts.saves(transport * (1 - part)))
        for name, part in zip(FORMS, (2 / width, 1 / width, kept), strict=True)
        if part < 1 and name in possible
    ]
    worth = [each for each in every if each.saves_share >= LEAST_GAIN]
    if worth and worth[0] is every[0]:  # what the setting does is the first
        because = [*_about(facts, kind), f"gradients are sent as {kind.dtype} (the time to convert them is left out)"]
        gain = f"would save {UP_TO}this share of a step: {shares(worth)}"
        most = max(each.saves_share for each in worth)
        yield Found(because, gain, most, do, remedies=worth)


def _faster_network(facts: Facts) -> Iterator[Found]:
    linked = [kind for kind in facts.kinds if kind.spans_nodes] or ([] if facts.on_one_cpu else facts.kinds)
    bound = [kind for kind in linked if kind.curve is not None and (kind.latency_s or 0) < kind.seconds / 2]
    if facts.comm <= BOTTLENECK_SHARE:
        return
    if not bound:
        yield from _full_links(facts)
        return
    kind = max(bound, key=lambda kind: kind.transport_s)
    # Groups that communicate at the same time share it.
    saved = min(sum(kind.transport_s for kind in bound), facts.comm * facts.step_s) / 2
    saves = facts.saves(saved)
    if saves >= LEAST_GAIN:
        after = facts.of_step(facts.comm - saved / facts.step_s) / (1 - saves)
        rest = percent(max(0.0, after))
        gain = f"twice the bandwidth would save {percent(saves)} of a step and reduce {_named(facts)} to {rest} of it"
        because = [*_about(facts, kind), "it is bandwidth-bound (α-β model)"]
        yield Found(because, gain, saves, remedies=[Remedy("", {"link": "2x"}, saves)])


def _full_links(facts: Facts) -> Iterator[Found]:
    """Where the speed of the links is not known, they limit a job if data waits for them during most of its communication."""
    sending = facts.sending
    if sending is not None and facts.kinds and 2 * sending.busy >= facts.comm:
        # Ranks in several pods of one node have links between them, too.
        wide = [kind for kind in facts.kinds if kind.spans_nodes] or facts.kinds
        saves = facts.saves(min(sending.busy, facts.comm) * facts.step_s / 2)
        full = f"the links between ranks have data to send {percent(sending.busy)} of the time, and send {rate(sending.speed)} meanwhile"
        because = [*_about(facts, max(wide, key=lambda kind: kind.seconds)), full]
        yield Found(because, f"twice the bandwidth would save {UP_TO}{percent(saves)} of a step", saves)


def _below_the_link(facts: Facts) -> Iterator[Found]:
    for kind in [] if facts.on_one_cpu else facts.kinds:
        if (
            kind.efficiency is None
            or kind.reference is None
            or kind.reference in INCONCLUSIVE
            or kind.efficiency >= BELOW_THE_LINK
        ):
            continue
        saves = facts.saves(kind.seconds * (1 - kind.efficiency / _GOOD))
        if saves >= LEAST_GAIN:
            because = [*_about(facts, kind), f"its efficiency is {percent(kind.efficiency)} against {kind.reference}"]
            gain = f"reaching 90% of the reference would save {percent(saves)} of a step"
            link = {"link": f"{_GOOD / kind.efficiency:.6f}x", "group": kind.group}
            alone = sum(other.group == kind.group for other in facts.kinds) == 1 and kind.efficiency > 0
            do = _GLOO_LINK if kind.backend == framework_settings.GLOO else ""
            yield Found(because, gain, saves, do, remedies=[Remedy("", link, saves)] if alone else [])


def _bubble(facts: Facts) -> Iterator[Found]:
    bubble = facts.bubble
    if bubble is None or not facts.pipeline or not WORTH <= bubble < 0.95:
        return
    # The bubble is (p−1)/(m+p−1), here with twice the m; the time per sample is proportional to 1/(1−bubble).
    after = bubble / (2 - bubble)
    saves = 1 - (1 - bubble) / (1 - after)
    gain = f"twice the micro-batches would reduce the bubble to {percent(after)} and the time per sample by {percent(saves)}"
    yield Found([f"ranks spend {percent(bubble)} of a step waiting for sends and receives"], gain, saves)


def _network(check: Callable[[Network], Iterable[NetworkFinding]]) -> Callable[[Facts], Iterator[Found]]:
    def rule(facts: Facts) -> Iterator[Found]:
        share = sum(kind.seconds for kind in facts.kinds if kind.spans_nodes) / facts.step_s
        for finding in check(facts.network) if share >= WORTH else ():
            because = [f"groups that span nodes take {percent(share)} of a step", *finding.because]
            yield Found(because, "not known: see `/api/v1/host`", None, finding.do, finding.title)

    return rule


def _findings(severity: str) -> Callable[[Facts], Iterator[Found]]:
    def rule(facts: Facts) -> Iterator[Found]:
        for finding in facts.findings:
            if finding.severity == severity and not (facts.whys.interrupted and finding.name in _OF_CTRL_C):
                yield Found([finding.says], "gain not known; see the finding", None, do=finding.do, title=finding.title)

    return rule


def _nccl_choice(facts: Facts) -> Iterator[Found]:
    for slow in slow_choices(facts.choices):
        chosen = slow.chosen
        kind = next((kind for kind in facts.kinds if (kind.group, kind.op) == (chosen.group, chosen.op)), None)
        if kind is not None and facts.saves(kind.seconds) >= LEAST_GAIN:
            title = f"NCCL chose {_choice(chosen)} for {kind.named()}, {_sizes(chosen)}"
            yield Found([*_about(facts, kind), *_measured(slow)], "not known", None, title=title)


def _measured(slow: SlowChoice) -> Iterator[str]:
    chosen, faster = slow
    yield f"{chosen.count} of the latest took {seconds(chosen.mean_s)} on average, busbw {rate(chosen.busbw)}"
    yield WHY_SLOW
    if faster is not None:
        yield f"with {_choice(faster)}, operations of {_sizes(faster)} had busbw {rate(faster.busbw)}"


def _choice(chosen: NcclOperations) -> str:
    return f"{chosen.algorithm}/{chosen.protocol}" if chosen.algorithm else str(chosen.protocol)


def _sizes(chosen: NcclOperations) -> str:
    return f"{size(1 << chosen.size_log2 - 1)} to {size(1 << chosen.size_log2)}"


RULES = (
    Rule(ERROR_RULE, "the job's log reports an error", "Follow the finding's advice; see `commwatch explain`.", _findings("error")),
    Rule(LATE_RULE, "a rank is late", "Find out what it does before its collectives (data loading, low clocks, other processes, "
         "an uneven batch).", late_ranks),
    Rule(CORES_RULE, "the ranks wait for CPU cores", "Give each rank cores of its own: fewer ranks, loader workers or threads (OMP_NUM_THREADS) on "
         "the node, or other processes elsewhere. `top` on the node shows what uses its cores. Then look again: a rank without a core is late, "
         "and so is its communication.", scarce_cores),
    Rule("pauses", "a rank pauses now and then", "Find out what it does in these steps: a checkpoint, an evaluation, a new data loader, a compilation. "
         "Do it less often, beside the training, or on all ranks at once.", pausing_rank),
    Rule("uneven_work", "the ranks take turns being late", "Give all ranks the same amount of work in each step: batches of similar length "
         "(bucketing, packing), even loading, and no work that only one rank does between collectives.", uneven_ranks),
    Rule("exchange_once", "gradients are exchanged in each of several backward passes of a step", "Exchange gradients only in the last backward "
         "pass before the optimizer.", _exchange_once),
    Rule("accumulate_gradients", "exchange gradients less often", "Accumulate gradients over several micro-batches, and exchange "
         "them once. Adapt the learning rate to the larger batch.", _accumulate),
    Rule("keep_parameters", "parameters are gathered again for the backward pass", "FSDP2: `fully_shard(…, reshard_after_forward=False)` keeps the "
         "parameters of a unit from the forward to the backward pass. That takes memory for the whole parameters of all such units.", _keep_parameters),
    Rule("larger_buckets", "operations are too small", "Put more data into each operation: larger buckets or units, or coalesced "
         "collectives.", _larger_buckets),
    Rule("overlap", "little of the communication is hidden behind compute", "Start operations early and wait for them late (`async_op=True`), and "
         "synchronise the host less often before collectives.", _overlap),
    Rule("below_the_link", "operations are slower than the link", "Look for a wrong transport or interface (`commwatch explain` on the job's NCCL "
         "log, `/api/v1/topology`), for link errors and for other traffic on the link.", _below_the_link),
    Rule("tensor_parallel_in_node", "tensor parallelism crosses nodes", "Order the ranks so that each tensor-parallel group stays within one "
         "node: it communicates in every layer, on the critical path.", _tensor_in_node),
    Rule("compression", "gradients can be compressed", "Exchange gradients as float16 or bfloat16, or compress them further. Check that "
         "training still converges.", _compression),
    Rule("faster_network", "the network limits the job", "Use a faster link, or several links (rails, bonding).", _faster_network),
    Rule("micro_batches", "the pipeline is partly idle", "Use more micro-batches per step, an interleaved or zero-bubble schedule, or more equal "
         "stages.", _bubble),
    Rule("gpu_far_from_nic", "a rank reaches its NIC across NUMA nodes", "Place ranks that communicate with other nodes on GPUs of the NIC's "
         "socket, or give each socket a NIC of its own.", _network(far_from_nic)),
    Rule("nic_below_its_rate", "a NIC runs below its full speed", "Check the slot, the cable and the switch port; see `commwatch doctor`.",
         _network(complaints("slow", "down"))),
    Rule("link_errors", "a link loses packets or is congested", "Check the cable, the transceiver, the switch port, PFC and ECN; see "
         "`commwatch doctor`.", _network(complaints("errors", "congestion"))),
    Rule("nccl_choice", "NCCL chose LL for large operations", "Check whether `NCCL_PROTO`, `NCCL_ALGO` or a tuner plugin (`NCCL_TUNER_PLUGIN`) "
         "makes NCCL choose this, and remove it: for this size NCCL usually chooses Simple or LL128.", _nccl_choice),
    Rule("nccl_finding", "NCCL's log reports a problem", "Follow the finding's advice; see `commwatch explain`.", _findings("warning")),
)  # fmt: skip


#: Rules on the exchange of gradients, or that take waiting between ranks for uneven work or an idle pipeline: ranks that serve wait for requests.
_OF_TRAINING = frozenset(
    {
        "exchange_once",
        "accumulate_gradients",
        "keep_parameters",
        "larger_buckets",
        "compression",
        "uneven_work",
        "micro_batches",
    }
)


def advice_on(facts: Facts | None) -> list[Advice]:
    """Return all advice: errors first, then late ranks and CPU cores as in the headline if they are worth it, then by gain; empty without facts.

    The rules see the job without its waiting for late ranks, because gradients and network do not cause that.
    """
    if facts is None:
        return []
    scarce = facts.for_cores is not None and facts.for_cores >= SCARCE_CORES
    rest, first = facts.without_waiting(), first_of(facts) or (CORES_RULE if scarce else "")
    return ranked(
        (
            Advice(
                rule.name,
                one.title or rule.title,
                one.because,
                one.do or rule.do,
                one.gain,
                one.saves_share,
                remedies=list(one.remedies),
            )
            for rule in sorted(RULES, key=lambda rule: rule.name != first)
            if facts.trains or rule.name not in _OF_TRAINING
            for one in rule.check(rest)
            if one.saves_share is None or one.saves_share >= LEAST_GAIN
        ),
        ahead=bool(first) or facts.waiting >= WORTH,
    )


def ranked(advice: Iterable[Advice], *, ahead: bool) -> list[Advice]:
    """Return advice by gain, that on errors at the begin, and other advice of unknown gain at the end.

    Args:
        ahead: advice on late ranks and CPU cores follows the errors, in the order given.
    """

    def place(each: Advice) -> tuple[bool, bool, bool, float]:
        is_first = ahead and each.rule in FIRST_RULES
        gain = 0.0 if is_first else -(each.saves_share or 0.0)
        return each.rule != ERROR_RULE, not is_first, each.saves_share is None, gain

    return sorted(advice, key=place)


def shares(remedies: Iterable[Remedy]) -> str:
    """Return the gain of each remedy as text."""
    return ", ".join(f"{each.name} {percent(each.saves_share)}".lstrip() for each in remedies)
