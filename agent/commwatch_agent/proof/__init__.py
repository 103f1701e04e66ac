"""What proves the figures: a bench of the network, and a job on GPUs whose figures other tools check."""
