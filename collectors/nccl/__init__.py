"""What NCCL and RCCL write with ``NCCL_DEBUG``: text to messages, messages to facts, facts to an account and findings."""
