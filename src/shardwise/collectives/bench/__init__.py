"""Collectives measured: next to the library's, on the processes at hand or on emulated hosts."""
