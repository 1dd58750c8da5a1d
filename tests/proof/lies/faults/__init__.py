"""The library of planted faults."""

from . import (  # noqa: F401
    copies,
    fused,
    hidden,
    images,
    layouts,
    moments,
    norms,
    parts,
    passes,
    results,
    slots,
    states,
    vendors,
)
from .fault import FAULTS, Fault, Group

__all__ = ["FAULTS", "Fault", "Group"]
