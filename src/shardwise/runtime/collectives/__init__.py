"""Run collectives as programs of messages, or over memory that ranks of a host share."""
