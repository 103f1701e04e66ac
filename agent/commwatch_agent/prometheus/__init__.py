"""Exports the totals to Prometheus; defines all metrics."""
