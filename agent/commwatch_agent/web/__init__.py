"""The HTTP side of an agent: listener, gate, routes and the live page."""
