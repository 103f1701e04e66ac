"""One file per source of the node: processes, GPUs, network devices."""
