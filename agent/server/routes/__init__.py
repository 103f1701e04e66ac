"""The routes of the query API, one file a subject."""
