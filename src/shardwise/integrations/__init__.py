"""Shardwise inside other trainers; each is an extra, `pip install shardwise[huggingface]`."""
