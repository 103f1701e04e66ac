"""The alert rules, evaluated inside the agent, and where its alerts go."""
