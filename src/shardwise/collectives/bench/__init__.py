"""Time collectives against the library's, on running processes or on emulated hosts."""
