"""Concludes once a second what is wrong, keeps it as incidents, and delivers their alerts."""
