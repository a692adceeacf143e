"""Operators that need communication or the place of a shard: what local calls name `rt.…`."""
