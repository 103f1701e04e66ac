"""The dashboard *Node*: GPUs, links, NCCL, and the cost of commwatch on one node."""

from __future__ import annotations

from typing import Any

from commwatch_dashboards.common import COMM_SHARE, NODE, Panel, Query, cells, dashboard, lines, number, one_of, states

_NODE = 'instance="$instance"'


def _rate(metric: str) -> str:
    return f"rate(commwatch_{metric}{{{_NODE}}}[$__rate_interval])"


def _now_of(metric: str) -> str:
    return f"commwatch_{metric}{{{_NODE}}}"


def build() -> dict[str, Any]:
    """Return the dashboard as Grafana's JSON."""
    return dashboard(
        NODE,
        "One node: its GPUs, links and network devices, NCCL's messages, and the cost of the agent.",
        [
            one_of(
                "instance",
                "Node",
                "The agent's target in Prometheus: one for each node.",
                "label_values(commwatch_build_info, instance)",
            )
        ],
        [
            ("Now", _now()),
            ("Communication", _communication()),
            ("GPUs", [*_gpus(), *_gpu_troubles()]),
            ("NVLink and PCIe", _gpu_links()),
            ("Network", _network()),
            ("Host", _host()),
            ("The monitor itself", [*_costs(), *_workings()]),
        ],
        alerts=_NODE,
    )


def _now() -> list[Panel]:
    return [
        number(
            "Agent reached",
            "Whether Prometheus reaches the agent of the node.",
            "bool_yes_no",
            f"max(up{{{_NODE}}} and on (job) group by (job) (last_over_time(commwatch_build_info{{{_NODE}}}[1h])))",
        ),
        number("Ranks alive", "Live ranks on the node.", "short", f"count({_now_of('rank_info')})", nothing="none"),
        number(
            "GPUs",
            "GPUs that respond. Absent on a node without GPUs.",
            "short",
            f"sum({_now_of('gpu_up')})",
            nothing="none",
        ),
        number(
            "GPUs lost",
            "GPUs that were present and no longer respond.",
            "short",
            f"sum(1 - {_now_of('gpu_up')})",
            marks=(1,),
            nothing="none",
        ),
        number(
            "Links up",
            "Network devices and RDMA ports whose link is up.",
            "short",
            f"sum({_now_of('network_up')})",
            nothing="none",
        ),
        number(
            "Collectors down",
            "Sources that the agent could not read at the last attempt; their values are missing.",
            "short",
            f"sum(1 - {_now_of('collector_up')})",
            marks=(1,),
        ),
    ]


def _communication() -> list[Panel]:
    return [
        lines(
            "Communication share by job",
            "Communication time divided by step time, mean of the job's ranks on this node. Above the line at 30%, "
            "communication deserves attention, unless compute hides it.",
            "percentunit",
            Query(f"avg by (job_id) ({_now_of('comm_share_ratio')})", "{{job_id}}"),
            marks=COMM_SHARE,
            most=1,
        ),
        lines(
            "Operations in flight",
            "Age of the oldest operation in flight on a rank of this node, by job and group. An operation whose age "
            "keeps rising hangs.",
            "s",
            Query(f"max by (job_id, group) ({_now_of('collective_in_flight_seconds')})", "{{job_id}} {{group}}"),
        ),
        lines(
            "NCCL messages",
            "Warnings per second in NCCL's logs, by class, and time-outs of PyTorch's watchdog. Only while the agent "
            "follows the logs.",
            "eps",
            Query(f"sum by (job_id, class) ({_rate('nccl_messages_total')})", "{{job_id}} {{class}}"),
        ),
        cells(
            "Ranks",
            "The GPU on which each rank computes (empty if it is not known), and the hook that records the rank. "
            "Click a job to open its dashboard.",
            {"job_id": "Job", "rank": "Rank", "gpu": "GPU", "hook": "Hook"},
            Query(f"max by (job_id, rank, gpu, hook) ({_now_of('rank_info')})", "Here", "short"),
            width=12,
            sort="-Rank",
        ),
    ]


def _gpus() -> list[Panel]:
    return [
        lines(
            "Utilisation",
            "Share of the last sampling period in which any kernel ran. NCCL's kernels that wait for a late rank "
            "count, too, so a high value does not mean that the GPU computes much.",
            "percentunit",
            Query(_now_of("gpu_utilization_ratio"), "GPU {{gpu}}"),
            most=1,
        ),
        lines(
            "Memory",
            "Share of the memory that is in use.",
            "percentunit",
            Query(f"{_now_of('gpu_memory_used_bytes')} / ({_now_of('gpu_memory_total_bytes')} > 0)", "GPU {{gpu}}"),
            most=1,
        ),
        lines(
            "Power",
            "Power draw and power limit of the GPU. A GPU at its limit is under full load, which is not a fault.",
            "watt",
            Query(_now_of("gpu_power_watts"), "GPU {{gpu}}"),
            Query(f"max({_now_of('gpu_power_limit_watts')})", "limit"),
        ),
        lines(
            "Temperature",
            "Temperature of the chip.",
            "celsius",
            Query(_now_of("gpu_temperature_celsius"), "GPU {{gpu}}"),
        ),
        lines(
            "Clocks",
            "Clock of the multiprocessors and of the memory. If one GPU is slower than the others, all ranks wait for "
            "it.",
            "hertz",
            Query(_now_of("gpu_clock_hertz"), "GPU {{gpu}} {{clock}}"),
        ),
    ]


def _gpu_troubles() -> list[Panel]:
    return [
        states(
            "Throttled",
            "Reasons for which a GPU throttles its clock. Idle and the power limit are not faults; hardware, thermal "
            "and power_brake are.",
            Query(_now_of("gpu_throttled"), "GPU {{gpu}} {{reason}}"),
            {"0": ("no", "transparent"), "1": ("throttled", "orange")},
        ),
        lines(
            "Xids",
            "Xids since the agent started, by number; docs/hardware.md explains each number.",
            "short",
            Query(_now_of("gpu_xid_errors_total"), "GPU {{gpu}} Xid {{xid}}"),
        ),
        lines(
            "Memory errors",
            "Memory errors since the driver was loaded. Errors that ECC could not correct may have corrupted results.",
            "short",
            Query(_now_of("gpu_ecc_errors_total"), "GPU {{gpu}} {{type}}"),
        ),
    ]


def _gpu_links() -> list[Panel]:
    return [
        lines(
            "NVLink",
            "Payload over all NVLinks (XGMI links) of a GPU.",
            "Bps",
            Query(_rate("gpu_nvlink_bytes_total"), "GPU {{gpu}} {{direction}}"),
        ),
        lines(
            "PCIe",
            "Bytes over PCIe, from the GPU's point of view: counted or, if the GPU has no counters, from a sample of "
            "20 ms every ten seconds.",
            "Bps",
            Query(_rate("gpu_pcie_bytes_total"), "GPU {{gpu}} {{direction}}"),
            Query(_now_of("gpu_pcie_bytes_per_second"), "GPU {{gpu}} {{direction}}, sampled"),
        ),
        lines(
            "NVLink errors",
            "Errors per second on all NVLinks of a GPU, by type.",
            "eps",
            Query(_rate("gpu_nvlink_errors_total"), "GPU {{gpu}} {{type}}"),
        ),
        lines(
            "PCIe replays",
            "Packets per second that were sent again over PCIe, because of a bad slot, riser or cable.",
            "eps",
            Query(_rate("gpu_pcie_replays_total"), "GPU {{gpu}}"),
        ),
    ]


def _network() -> list[Panel]:
    busier = f"max by (device) ({_rate('network_bytes_total')})"
    return [
        lines(
            "Traffic",
            "Bytes per second of each network device and RDMA port. Do not add up a port and its network device, or a "
            "bond and its parts.",
            "Bps",
            Query(_rate("network_bytes_total"), "{{device}} {{direction}}"),
        ),
        lines(
            "Share of the link",
            "Traffic of a device in its busier direction, divided by the speed of its link. Absent if the speed is not "
            "known.",
            "percentunit",
            Query(
                f"{busier} / on (device) (max by (device) ({_now_of('network_speed_bytes_per_second')}) > 0)",
                "{{device}}",
            ),
            most=1,
        ),
        lines(
            "Errors and drops",
            "Packets per second with errors, and packets per second that were dropped without an error.",
            "pps",
            Query(_rate("network_errors_total"), "{{device}} {{direction}} errors"),
            Query(_rate("network_drops_total"), "{{device}} {{direction}} drops"),
        ),
        lines(
            "RDMA events",
            "Errors, congestion events and retransmissions per second of RDMA ports; docs/hardware.md explains each event.",
            "eps",
            Query(_rate("infiniband_events_total"), "{{device}} {{event}}"),
        ),
        states(
            "Links",
            "Whether the link of a device is up.",
            Query(_now_of("network_up"), "{{device}}"),
            {"0": ("down", "red"), "1": ("up", "green")},
        ),
        lines(
            "Links lost",
            "Number of times that a device lost its link within the last interval.",
            "short",
            Query(f"increase({_now_of('network_link_downs_total')}[$__rate_interval])", "{{device}}"),
        ),
    ]


def _host() -> list[Panel]:
    return [
        lines(
            "CPU",
            "Cores in use by mode. softirq is the processing of incoming packets: sockets need it, RDMA does not.",
            "suffix: cores",
            Query(f'rate(commwatch_host_cpu_seconds_total{{{_NODE}, mode!="idle"}}[$__rate_interval])', "{{mode}}"),
        ),
        lines(
            "Memory available",
            "Memory of the node that is available to programs, and its total memory.",
            "bytes",
            Query(_now_of("host_memory_available_bytes"), "available"),
            Query(_now_of("host_memory_total_bytes"), "total"),
        ),
        lines(
            "Pressure",
            "Share of time in which at least one task was stalled for lack of CPU, memory or I/O.",
            "percentunit",
            Query(_rate("host_pressure_seconds_total"), "{{resource}}"),
        ),
    ]


def _costs() -> list[Panel]:
    return [
        lines(
            "Cost of the probe",
            "Share of a trainer's time that the probe takes, estimated from one call in 64; for each job, the rank "
            "with the highest share.",
            "percentunit",
            Query(f"max by (job_id) ({_rate('probe_seconds_total')})", "{{job_id}}"),
        ),
        lines(
            "Records",
            "Records per second that the agent reads from the rings, and records per second that are lost.",
            "eps",
            Query(f"sum by (job_id) ({_rate('events_total')})", "{{job_id}}"),
            Query(f"sum by (job_id) ({_rate('events_dropped_total')})", "{{job_id}} lost"),
        ),
        lines(
            "Groups without a label of their own",
            "Groups counted under the label `other`, because a job has more than 32 groups, and groups of a rank beyond 64.",
            "short",
            Query(_now_of("series_dropped_total"), "groups"),
        ),
        lines(
            "Search for incidents",
            "Share of a core that the agent takes to find out what is wrong.",
            "percentunit",
            Query(_rate("alert_evaluation_seconds_total"), "share of a core"),
        ),
    ]


def _workings() -> list[Panel]:
    return [
        lines(
            "Notifications",
            "Alerts per second that the agent sent to its receivers, by result. Empty without receivers.",
            "eps",
            Query(_rate("notifications_total"), "{{receiver}} {{result}}"),
        ),
        lines(
            "Notifications waiting",
            "Alerts whose latest state a receiver does not have yet.",
            "short",
            Query(_now_of("notifications_waiting"), "{{receiver}}"),
        ),
        states(
            "Collectors",
            "Whether a source of the node could be read.",
            Query(_now_of("collector_up"), "{{collector}}"),
            {"0": ("down", "red"), "1": ("up", "green")},
        ),
        lines(
            "Scrape",
            "Time that Prometheus takes to scrape the agent.",
            "s",
            Query(f"scrape_duration_seconds{{{_NODE}}}", "scrape"),
        ),
    ]
