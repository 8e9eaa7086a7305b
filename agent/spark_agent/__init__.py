"""Spark's agent: serves a model on this machine, counts its routing, and uploads counts only after a yes."""

__all__ = ["__version__"]

__version__ = "0.1.0"
