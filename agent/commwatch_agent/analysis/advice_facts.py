"""The facts about a job that the rules of ``advice.py`` use. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from commwatch_agent.analysis import framework_settings
from commwatch_agent.analysis.network_advice import Network
from commwatch_agent.analysis.waits.links import Sending
from commwatch_agent.model.alpha_beta import Curve
from commwatch_agent.model.api_views import Remedy
from commwatch_agent.model.model_parts.repeats import Repeat
from commwatch_agent.model.nccl_views import NcclOperations
from commwatch_agent.text.units import percent
from commwatch_collectors.nccl.views import Finding
from commwatch_collectors.node.cores import Cores

#: Shares of a step: above the first, communication is the bottleneck; above the second, it deserves attention.
#: The threshold of the alert ``CommShareHigh`` has the same default, and is a setting (``alerts/commwatch_alerts/rules.yaml``).
BOTTLENECK_SHARE, WORTH = 0.30, 0.10
#: Smaller gains (shares of step time) are ignored.
LEAST_GAIN = 0.01
#: Share of the time from which on it is worth a word that estimates leave out that main threads wait for a core.
_CORES_MATTER = WORTH
#: Names of the rules about late ranks, and about ranks without CPU time: their advice comes first (``headline.first``).
FIRST_RULES = LATE_RULE, CORES_RULE = "straggler", "scarce_cores"
#: Name of the rule about errors in the job's log, before which no other advice helps.
ERROR_RULE = "log_error"
#: Marks a gain as a bound, in its text.
UP_TO = "up to "


def on_condition(cores: float | None) -> str:
    """Return what an estimate assumes of the CPU cores, as ``that the ranks have …``; empty: main threads hardly wait for one, or it is not known.

    Args:
        cores: share of the time that main threads wait for a CPU core, as ``headline.mean_core_wait`` returns it.
    """
    if cores is None or cores < _CORES_MATTER:
        return ""
    return f"that the ranks have CPU cores, for which their main threads waited {percent(cores)} of the time"


class Found(NamedTuple):
    """One result of a rule."""

    because: list[str]
    gain: str
    saves_share: float | None
    #: Replace the rule's own texts unless empty.
    do: str = ""
    title: str = ""
    remedies: Sequence[Remedy] = ()


class Kind(NamedTuple):
    """The operations of one kind in one group; numbers are per rank and step."""

    group: str
    op: str
    group_size: int
    #: Operations per step, their mean size S in bytes (0: none), and their seconds per step.
    per_step: float
    size_bytes: float
    seconds: float
    #: Expected durations; ``None``: no reference.
    curve: Curve | None = None
    #: Expected over measured time, and the kind of reference; ``None``: not known.
    efficiency: float | None = None
    reference: str | None = None
    #: Most ranks of the group on one host, of those that are known.
    local: int = 0
    #: ``None``: not known.
    dtype: str | None = None
    #: The part of ``seconds`` spent waiting for late ranks, where it is known.
    waiting_s: float = 0.0
    #: A data parallel group of the job has all_gathers and reduce_scatters.
    sharded: bool = False
    #: The frameworks that exchange the gradients of the job, and the backend of the group; ``None``: not known.
    frameworks: frozenset[str] | None = None
    backend: str | None = None
    #: What they communicate more than once in a step.
    repeat: Repeat = Repeat()

    @property
    def spans_nodes(self) -> bool:
        """Whether the group has ranks on several nodes."""
        return self.local < self.group_size

    @property
    def latency_s(self) -> float | None:
        """Seconds per step that do not depend on sizes, at most ``seconds``; ``None``: no reference."""
        if self.curve is None:
            return None
        latency = self.curve.latency_s(self.op, self.group_size)
        if self.reference == "own_best" and (expected := self.curve.time_s(self.op, self.group_size, self.size_bytes)):
            # Through the fastest operations; the others take longer, both parts alike.
            return self.seconds * latency / expected
        return min(self.seconds, self.per_step * latency)

    @property
    def transport_s(self) -> float:
        """Seconds per step that fewer bytes could save at most: all but the latency."""
        return max(0.0, self.seconds - (self.latency_s or 0.0))

    @property
    def gradients(self) -> bool:
        """Whether these are probably the exchange of gradients: large reductions of a group that is not for model parallelism."""
        return self.role in (framework_settings.REPLICATED, framework_settings.SHARDED) and self.op != "all_gather"

    @property
    def role(self) -> str:
        """Purpose of the operations: one of the roles in ``framework_settings``."""
        return framework_settings.role(self.group, self.op, self.size_bytes, self.sharded)

    def knob(self, rule: str) -> str:
        """Return the advice of a rule for this role; empty: the general text of the rule applies."""
        return framework_settings.knob(rule, self.role, self.frameworks, self.backend)

    def compressions(self, width: int) -> frozenset[str]:
        """Return the ``FORMS`` that the setting for these operations has, whose values have ``width`` bytes."""
        return framework_settings.compressions(self.role, self.frameworks, width)

    def named(self) -> str:
        return f"{self.op} of group {self.group}"


class Whys(NamedTuple):
    """Why ranks wait, as incidents say."""

    #: Of late ranks: codes of ``ingest.why_late``, where that is known.
    late: Mapping[int, str]
    #: Share of the time (0 to 1) in which they wait for a slow link; 0: none is known.
    slow_link: float = 0.0
    #: The ranks that were late by an incident, which has where in their code.
    have_incidents: frozenset[int] = frozenset()
    #: Ctrl-C has ended the job.
    interrupted: bool = False
    #: Where in their code late ranks are, as ``load (train.py:88)``, where that is known.
    places: Mapping[int, str] = MappingProxyType({})
    #: What incidents in which one rank was late have cost, by that rank, in rank seconds.
    costs: Mapping[int, float] = MappingProxyType({})


NO_WHYS = Whys({})


class Pauses(NamedTuple):
    """How the others wait for the pauses of one rank."""

    rank: int
    #: In how many of how many steps, and how long the longest of these took, in s.
    number: int
    steps: int
    longest_s: float
    #: Share of the time (0 to 1) that the others wait in these steps beyond the usual.
    cost: float


class Facts(NamedTuple):
    """The facts about a job that the rules use; all shares are 0 to 1."""

    #: Mean step in seconds.
    step_s: float
    #: Shares of step time; ``None``: not known.
    comm: float
    exposed: float | None
    kinds: list[Kind]
    #: Share of its steps that a rank waited for late ranks and messages, for ranks with enough known steps.
    waits: Mapping[int, float]
    #: Share of the steps spent in waits for messages; ``None``: there are none.
    bubble: float | None
    findings: list[Finding]
    network: Network = Network()
    #: The latest operations that NCCL timed, by what it chose for them; the most time first.
    choices: Sequence[NcclOperations] = ()
    #: The stragglers by rank, with the share of time that the others wait for each: the current ones, else those of the steps.
    late: Mapping[int, float] = MappingProxyType({})
    whys: Whys = NO_WHYS
    #: Share of a step that ``without_waiting`` has removed as waiting for late ranks.
    left_out: float = 0.0
    #: The exposed share before that; ``None``: not known, or ``exposed`` has it.
    exposed_at_first: float | None = None
    #: A group is a pipeline (``pipelines.are_pipeline``).
    pipeline: bool = False
    #: Mean of ``RankView.core_wait_share``; ``None``: not known.
    for_cores: float | None = None
    #: The rank that pauses in some steps; ``None``: there is none, or it is not known.
    pauses: Pauses | None = None
    #: How busy the links between the nodes are; ``None``: not known, or data does not wait for them.
    sending: Sending | None = None
    #: False: its steps are iterations, perhaps of inference, so that nothing is known of gradients.
    trains: bool = True
    #: Ranks that are known; 0: not known.
    ranks: int = 0
    #: Cores and threads of the ranks of each node, as far as they are known.
    cores: Mapping[str, Sequence[Cores]] = MappingProxyType({})

    @property
    def visible(self) -> float:
        """Exposed part of the communication (0 to 1); 1 if not known."""
        return 1.0 if self.exposed is None or not self.comm else min(1.0, self.exposed / self.comm)

    @property
    def all_exposed(self) -> float | None:
        """The exposed share with the waiting for late ranks; ``None``: not known."""
        return self.exposed if self.exposed_at_first is None else self.exposed_at_first

    @property
    def gradients(self) -> Kind | None:
        """The largest exchange of gradients; ``None``: there is none."""
        return max((kind for kind in self.kinds if kind.gradients), key=lambda kind: kind.seconds, default=None)

    @property
    def on_one_cpu(self) -> bool:
        """Whether all operations are known to pass through the CPU and the memory of one node, so that no link limits them.

        A link that the settings name for a group is used even so: its ranks may be in several pods of the node.
        """
        of_one = (
            kind.backend == framework_settings.GLOO and not kind.spans_nodes and kind.reference != "catalogue"
            for kind in self.kinds
        )  # fmt: skip
        return bool(self.kinds) and self.sending is None and all(of_one)

    @property
    def waiting(self) -> float:
        """Share of a step spent waiting for late ranks, as far as it is known: as a mean of all ranks, by operations or by stragglers."""
        return min(self.comm, max(self._waited, *(self.mean_of_all(share) for share in self.late.values()), 0.0))

    @property
    def _waited(self) -> float:
        """Share of a step that operations spent waiting for late ranks."""
        return min(self.comm, sum(kind.waiting_s for kind in self.kinds) / self.step_s)

    def mean_of_all(self, share: float) -> float:
        """Return the mean over all ranks of a share of time that all but one of them wait; 0 if their number is not known."""
        return share * (self.ranks - 1) / self.ranks if self.ranks else 0.0

    def without_waiting(self) -> Facts:
        """Return the facts as if no rank were late: steps and communication are shorter by the waiting."""
        waiting = self.waiting
        rest = 1 - waiting
        if waiting < LEAST_GAIN or rest < LEAST_GAIN:
            return self
        # What stragglers cost beyond the waiting of the operations is a part of all of these alike.
        part = (self.comm - waiting) / (self.comm - self._waited) if self.comm > self._waited else 0.0
        return self._replace(
            step_s=self.step_s * rest,
            comm=(self.comm - waiting) / rest,
            exposed=None if self.exposed is None else max(0.0, self.exposed - waiting) / rest,
            kinds=[kind._replace(seconds=(kind.seconds - kind.waiting_s) * part, waiting_s=0.0) for kind in self.kinds],
            left_out=waiting,
            sending=self.sending and self.sending._replace(busy=min(1.0, self.sending.busy / rest)),
            exposed_at_first=self.exposed,
        )

    def of_step(self, share: float) -> float:
        """Return a share of ``step_s`` as a share of a step with the waiting that ``without_waiting`` has removed."""
        return share * (1 - self.left_out)

    def saves(self, seconds: float) -> float:
        """Return the share of a step saved by ``seconds`` less communication, if hidden and exposed parts shrink alike."""
        return self.of_step(seconds / self.step_s * self.visible)
