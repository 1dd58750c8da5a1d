"""quantexp: quantised training experiments that prove what ran."""

__version__ = "0.1.0"
