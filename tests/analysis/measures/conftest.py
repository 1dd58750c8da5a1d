"""Captures of a few small tensors."""

from tests.analysis.draw.conftest import look

__all__ = ["look"]
