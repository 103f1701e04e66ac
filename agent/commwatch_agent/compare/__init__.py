"""Compares two jobs: their steps, operations and settings, with confidence intervals."""
