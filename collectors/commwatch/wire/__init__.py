"""Formats that trainer and agent share: the ring buffer, its records, names and variables. Standard library only."""
