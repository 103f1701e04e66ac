"""Collectors of the agent: one file per source of the node, of its GPUs and network, and of NCCL's logs."""
