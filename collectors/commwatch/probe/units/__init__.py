"""Names of what the collectives of a model carry: the buckets of DDP and the units of FSDP2."""
