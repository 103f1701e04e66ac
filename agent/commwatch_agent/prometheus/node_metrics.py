"""Defines the metrics of a node: its GPUs, network devices, CPUs and memory."""

from __future__ import annotations

from commwatch_agent.prometheus.spec import Spec

_GPU = ("gpu",)
_DIRECTION = ("device", "direction")

NODE_METRICS = (
    Spec(
        "commwatch_gpu_utilization_ratio",
        "gauge",
        "Ratio of time in which at least one kernel ran on the GPU, over the last sampling period.",
        _GPU,
    ),
    Spec(
        "commwatch_gpu_memory_utilization_ratio",
        "gauge",
        "Ratio of time in which GPU memory was read or written, over the last sampling period.",
        _GPU,
    ),
    Spec("commwatch_gpu_memory_used_bytes", "gauge", "GPU memory in use, in bytes.", _GPU),
    Spec("commwatch_gpu_memory_total_bytes", "gauge", "Total GPU memory, in bytes.", _GPU),
    Spec("commwatch_gpu_power_watts", "gauge", "Current power draw of the GPU, in watts.", _GPU),
    Spec("commwatch_gpu_power_limit_watts", "gauge", "Power limit of the GPU, in watts.", _GPU),
    Spec(
        "commwatch_gpu_energy_joules_total",
        "counter",
        "Total energy consumed by the GPU since its driver was loaded, in joules.",
        _GPU,
    ),
    Spec(
        "commwatch_gpu_temperature_celsius", "gauge", "Current temperature of the GPU chip, in degrees Celsius.", _GPU
    ),
    Spec(
        "commwatch_gpu_clock_hertz",
        "gauge",
        "Current clock frequency of the GPU's multiprocessors or memory, in hertz.",
        (*_GPU, "clock"),
    ),
    Spec(
        "commwatch_gpu_throttled",
        "gauge",
        "Whether the GPU's clock is throttled for this reason (1 for yes, 0 for no).",
        (*_GPU, "reason"),
    ),
    Spec(
        "commwatch_gpu_pcie_bytes_total",
        "counter",
        "Total number of bytes transferred over PCIe, in the direction seen by the GPU.",
        (*_GPU, "direction"),
    ),
    Spec(
        "commwatch_gpu_pcie_bytes_per_second",
        "gauge",
        "PCIe transfer rate in a sample of 20 ms every ten seconds, for GPUs without a byte counter, in bytes per second.",
        (*_GPU, "direction"),
    ),
    Spec("commwatch_gpu_pcie_replays_total", "counter", "Total number of packets retransmitted over PCIe.", _GPU),
    Spec(
        "commwatch_gpu_nvlink_bytes_total",
        "counter",
        "Total number of payload bytes transferred over all NVLinks of the GPU.",
        (*_GPU, "direction"),
    ),
    Spec(
        "commwatch_gpu_nvlink_errors_total",
        "counter",
        "Total number of errors on all NVLinks of the GPU.",
        (*_GPU, "type"),
    ),
    Spec(
        "commwatch_gpu_ecc_errors_total",
        "counter",
        "Total number of GPU memory errors since the driver was loaded.",
        (*_GPU, "type"),
    ),
    Spec(
        "commwatch_gpu_xid_errors_total",
        "counter",
        "Total number of Xid errors seen since the agent started.",
        (*_GPU, "xid"),
    ),
    Spec("commwatch_gpu_up", "gauge", "Whether the GPU responds (1 for yes, 0 if it no longer does).", _GPU),
    Spec(
        "commwatch_gpu_info",
        "gauge",
        "A metric with a constant value of 1, labelled with the identity of the GPU.",
        (*_GPU, "uuid", "bus_id", "name", "vendor", "driver_version"),
    ),
    Spec(
        "commwatch_network_bytes_total",
        "counter",
        "Total number of bytes transferred by a network device or RDMA port.",
        _DIRECTION,
    ),
    Spec(
        "commwatch_network_packets_total",
        "counter",
        "Total number of packets transferred by a network device or RDMA port.",
        _DIRECTION,
    ),
    Spec(
        "commwatch_network_errors_total",
        "counter",
        "Total number of packets with errors on a network device or RDMA port.",
        _DIRECTION,
    ),
    Spec(
        "commwatch_network_drops_total",
        "counter",
        "Total number of packets without errors that a network device or RDMA port dropped.",
        _DIRECTION,
    ),
    Spec(
        "commwatch_network_speed_bytes_per_second",
        "gauge",
        "Link speed of a network device in each direction, excluding line coding overhead, in bytes per second; absent if unknown.",
        ("device",),
    ),
    Spec(
        "commwatch_network_up",
        "gauge",
        "Whether the link of a network device is up (1 for yes, 0 for no).",
        ("device",),
    ),
    Spec(
        "commwatch_network_link_downs_total",
        "counter",
        "Total number of times that the link of a network device was lost.",
        ("device",),
    ),
    Spec(
        "commwatch_infiniband_events_total",
        "counter",
        "Total number of errors, congestion events and retransmissions of an RDMA port, as counted by its driver.",
        ("device", "event"),
    ),
    Spec(
        "commwatch_network_info",
        "gauge",
        "A metric with a constant value of 1, labelled with the kind, network device, location and link type of a device.",
        ("device", "kind", "netdev", "pci", "numa_node", "link"),
    ),
    Spec(
        "commwatch_host_cpu_seconds_total",
        "counter",
        "Total time that all CPU cores spent in each mode, in seconds.",
        ("mode",),
    ),
    Spec("commwatch_host_memory_total_bytes", "gauge", "Total memory of the node, in bytes."),
    Spec(
        "commwatch_host_memory_available_bytes",
        "gauge",
        "Memory of the node that is available to programs, in bytes.",
    ),
    Spec(
        "commwatch_host_pressure_seconds_total",
        "counter",
        "Total time in which at least one task was stalled for lack of a resource, in seconds.",
        ("resource",),
    ),
)
