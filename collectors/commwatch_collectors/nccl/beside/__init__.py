"""What other programs print beside NCCL in the same log: PyTorch, Gloo, launchers, the kernel."""
