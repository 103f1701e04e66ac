"""Who waits for whom, in operations and outside them, and whether that is a fault."""
