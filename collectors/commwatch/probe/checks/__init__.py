"""Checksums of replicated parameters, when they are made, and when the hook makes those of collectives."""
