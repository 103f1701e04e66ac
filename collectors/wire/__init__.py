"""What trainer and agent both read: the ring, its records, names and variables. Standard library only."""
