"""The verbs of Shardwise, a module each: compile, parallelize, verify, explain, advise.

`shardwise` itself exports them. This package exports nothing, because a submodule and a function of
the same name cannot both be its attributes.
"""
