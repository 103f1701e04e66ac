"""Evaluates the alert rules inside the agent and delivers its alerts."""
