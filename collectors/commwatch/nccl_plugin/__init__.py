"""NCCL's profiler plugin, in C; ``collectors/commwatch/probe/native`` builds it, and asks it for the times of operations."""
