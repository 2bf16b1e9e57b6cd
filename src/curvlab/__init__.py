"""Curvature of neural networks: reproduce, check and extend published claims."""

__version__ = "0.1.0"
