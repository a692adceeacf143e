"""`shardwise watch RUN`: follow a training run in a terminal or on a local page.

Watching only reads the folder of the run and does not affect it.
"""
