"""`python -m shardwise.cli`."""

from shardwise.cli import main

main()
