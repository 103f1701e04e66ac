"""Draws conclusions from totals: summaries, verdicts, advice, network traffic."""
