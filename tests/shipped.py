"""Words that compose a shipped scheme."""

from __future__ import annotations


def words_of(scheme: str) -> list[str]:
    """The choice of a scheme, and of the optimizer that it needs: `more/muon_int8` rounds the state of Muon."""
    needs_muon = scheme.rpartition("/")[2].startswith("muon_")
    return [f"quant={scheme}", *(["training.optimizer=muon"] if needs_muon else [])]
