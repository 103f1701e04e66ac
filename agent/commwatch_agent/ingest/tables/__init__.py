"""Tables of one rank, and how much memory they may take."""
