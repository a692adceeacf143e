"""A training while it runs: `shardwise watch RUN`, on a terminal or as a local page.

Enters: the folder of a run. Leaves: what it shows. It only reads: the run does not know of it.
"""
