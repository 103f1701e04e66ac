"""Builders of the Grafana dashboards, and the generated JSON beside them."""
