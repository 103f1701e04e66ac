"""Parsers of the NCCL and RCCL output with ``NCCL_DEBUG``: text to messages, to facts, to an account and findings."""
