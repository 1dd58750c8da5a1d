"""The role of a captured tensor in its layer, and the order of a layer's modules."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum

from quantexp.capture.operands import SCALE, source_of
from quantexp.model.decoder import OUTPUT


class Kind(Enum):
    """The role of a tensor in its layer."""

    ACTIVATION = "activations"
    WEIGHT = "weights"
    ATTENTION = "q, k, v"
    PROBABILITY = "attention weights"
    GRADIENT = "gradients"
    SCALE = "scales"


_KINDS = {
    "weight": Kind.WEIGHT,
    "query": Kind.ATTENTION,
    "key": Kind.ATTENTION,
    "value": Kind.ATTENTION,
    "attn_weights": Kind.PROBABILITY,
}
#: The order of a decoder layer, then what follows the decoder.
_FLOW = ("qkv", "q", "kv", "attention", "proj", "fc1", "fc2", "residual", OUTPUT)


def kind_of(tensor: str) -> Kind:
    """The role of a tensor, by its name: every grad is a gradient, inputs and outputs are activations.

    A quantised operand is what it was made from.
    """
    if tensor.endswith(SCALE):
        return Kind.SCALE
    source = source_of(tensor)
    if "grad" in source:
        return Kind.GRADIENT
    return _KINDS.get(source, Kind.ACTIVATION)


def experts_as_one(module: str) -> str:
    """The module's name without an expert's number."""
    return re.sub(r"^expert\d+", "expert", module)


def in_flow(modules: Iterable[str]) -> list[str]:
    """Each module once, in the order of the forward pass, then unknown modules."""

    def place(module: str) -> tuple[int, str]:
        stem = module.split("-")[0] if module.startswith(("q-", "kv-")) else module.split("-")[-1]
        return (_FLOW.index(stem) if stem in _FLOW else len(_FLOW), module)

    return sorted(set(modules), key=place)
