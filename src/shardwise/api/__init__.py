"""The verbs of the public API."""
