"""Train JAX functions: `sw.from_jax` reads a loss function and its parameters as a module."""

from shardwise.integrations.jax.module import JaxModule, from_jax

__all__ = ["JaxModule", "from_jax"]
