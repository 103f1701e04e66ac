"""Pushes metrics, alerts and verdicts to an OTLP receiver, for sites without a scrape. Needs the extra ``otlp``."""
