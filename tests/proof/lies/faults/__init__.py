"""The library of planted faults."""

from . import (  # noqa: F401
    copies,
    fused,
    hidden,
    images,
    layouts,
    loops,
    losses,
    moments,
    norms,
    optimizer,
    parts,
    passes,
    results,
    routers,
    row_sums,
    slots,
    states,
    sums,
    updates,
    vendors,
)
from .fault import FAULTS, Fault, Group

__all__ = ["FAULTS", "Fault", "Group"]
