"""The rules on continuous conditions, which the metrics of the agent show. Pure.

Each yields exactly the conditions to which at least the mildest row of the table (``alerts/commwatch_alerts/rules.yaml``)
applies, each with a key of its own among those of one node.
"""

from __future__ import annotations

from commwatch_agent.incidents.device_rules import gpu_fault, network_fault
from commwatch_agent.incidents.link_rules import bandwidth_low, link_saturated
from commwatch_agent.incidents.metric_conditions import MetricRule, Name
from commwatch_agent.incidents.share_rules import comm_bound, exposed_comm, gpu_underused
from commwatch_agent.incidents.software_rules import agent_fault, capture_incomplete, nccl_fault

#: By kind.
METRIC_RULES: tuple[tuple[str, MetricRule], ...] = (
    ("comm_bound", comm_bound),
    ("exposed_comm", exposed_comm),
    ("link_saturated", link_saturated),
    ("bandwidth_low", bandwidth_low),
    ("gpu_underused", gpu_underused),
    ("gpu_fault", gpu_fault),
    ("network_fault", network_fault),
    ("nccl_fault", nccl_fault),
    ("capture_incomplete", capture_incomplete),
    ("agent_fault", agent_fault),
)
#: The samples that a ``MetricWindow`` keeps for them.
METRIC_NAMES = frozenset(name.value for name in Name)
