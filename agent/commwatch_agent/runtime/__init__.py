"""Threads, signals, locks and the run directory of an agent."""
