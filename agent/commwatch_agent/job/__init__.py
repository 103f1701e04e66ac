"""The whole job: the parts of several nodes put together."""
