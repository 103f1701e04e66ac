"""Each question that the REST API, the page and the command line ask of one node or of all nodes of a job, once."""
