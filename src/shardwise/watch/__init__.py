"""Follow a training run while it runs: `shardwise watch RUN`, in a terminal or as a local page. It
only reads the run's folder; the run is not aware of it.
"""
