"""Totals to conclusions: summaries, verdicts, advice, the network's share."""
