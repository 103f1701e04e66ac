"""Numbers, tables and terminal text, as people read them; imports nothing of the agent."""
