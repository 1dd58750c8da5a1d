"""The place of a captured tensor in the model and run, its role in its layer, and the order of a layer's modules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from quantexp.capture.operands import SCALE, source_of
from quantexp.model.decoder import OUTPUT, layer_words


@dataclass(frozen=True)
class Place:
    """The place of a tensor from the manifest; a default where the names of an old collection do not have the value."""

    #: qkv, proj, fc1, fc2, attention, expert7-fc1, ...; in an old collection the layer type.
    module: str = ""
    #: Global, from 0.
    layer: int = -1
    #: attention or linear.
    layer_type: str = ""
    operation: str = ""
    #: pre or post the operation.
    phase: str = ""
    #: query, key, value, input, weight, output, grad_output, ...
    tensor: str = ""
    #: mxfp8, mxfp4, hifp8 or bf16.
    quant_type: str = ""
    iteration: int = 0
    #: None if the tensor belongs to no single micro-batch.
    micro_batch: int | None = None
    #: The rank; in a model-parallel layout, where several ranks hold a tensor, `data_rank`.
    rank: int = 0

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Place:
        """The place of a line of the manifest."""
        known = {
            field.name: value
            for field in fields(cls)
            if (value := metadata.get(field.name)) is not None
        }
        if (data_rank := metadata.get("data_rank")) is not None:
            known["rank"] = data_rank
        return cls(**{"module": metadata.get("layer_type") or "", **known})

    @property
    def kind(self) -> str:
        """The module with its tensor, with all experts as one: `fc1 input`; the key for comparing layers."""
        return f"{experts_as_one(self.module)} {self.tensor}"

    @property
    def layer_label(self) -> str:
        """The layer's number, `output` for the output layer, `?` if it is not known."""
        return layer_words(self.layer, self.module) if self.layer >= 0 else "?"

    @property
    def source(self) -> str:
        """The source tensor of a quantised operand; any other tensor is its own source."""
        return source_of(self.tensor)

    @property
    def is_scale(self) -> bool:
        """Whether the values are codes of block scales."""
        return self.tensor.endswith(SCALE)

    @property
    def label(self) -> str:
        """`fc1 L3 backward grad_output`; the output layer has no number."""
        layer = f"L{self.layer}" if self.layer >= 0 and self.module != OUTPUT else ""
        return " ".join(w for w in (self.module, layer, self.operation, self.tensor) if w)


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
    "exp_scores": Kind.PROBABILITY,
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
