"""The parts of a model that its collectives carry: buckets of DDP and units of FSDP2."""
