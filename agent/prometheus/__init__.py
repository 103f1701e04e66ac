"""Totals to Prometheus' exposition format, and the one list of metrics."""
