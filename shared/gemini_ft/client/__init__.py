"""The client of the REST API: every operation, for plain and for async code."""
