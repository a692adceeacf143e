"""Transports that carry collectives and point-to-point messages between ranks."""
