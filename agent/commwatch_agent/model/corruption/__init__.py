"""Compares the checksums of ranks: of replicated parameters, and of the data of collectives."""
