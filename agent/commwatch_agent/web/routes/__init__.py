"""The routes of the query API, one file per subject."""
