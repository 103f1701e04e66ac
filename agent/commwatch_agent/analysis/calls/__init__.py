"""What the ranks of a group pass to its collectives, and what of it differs. Pure."""
