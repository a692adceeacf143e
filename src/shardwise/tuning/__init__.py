"""Measuring plans on this machine and choosing the fastest."""
