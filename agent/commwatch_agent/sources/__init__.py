"""Sources that an agent watches in threads of their own."""
