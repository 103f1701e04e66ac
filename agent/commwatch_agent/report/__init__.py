"""The report of a job as text, JSON and a page with charts."""
