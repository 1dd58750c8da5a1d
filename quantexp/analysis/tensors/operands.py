"""The operands of matrix products that a captured tensor was, and the declared format of each.

`formats` in the manifest names every slot of a tensor's module: product.operand (`fprop.x`, `dgrad_q.k`),
with a site before it or not, and the axis that blocks run along in the product's words. Captured
tensors lie as Megatron has them:

    linear      x, g: tokens .. width      w: output width, input width
    attention   q, k, v, dO: tokens, batch, heads, head_dim      P, dS: batch, heads, queries, keys
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantexp.analysis.tensors.place import Place
from quantexp.analysis.tensors.rows import ROW_SEQUENCES
from quantexp.errors import CaptureError
from quantexp.formats import Format, get_format
from quantexp.quant.sites import PRODUCTS, Product

#: The working precision and the reused forward copy, which are not quantisations.
_UNQUANTISED = frozenset({"bf16", "fp16", "fp32", "reuse"})

_OPERANDS = {
    ("linear", "input"): "x",
    ("linear", "weight"): "w",
    ("linear", "grad_output"): "g",
    ("attention", "query"): "q",
    ("attention", "key"): "k",
    ("attention", "value"): "v",
    ("attention", "attn_weights"): "P",
    ("attention", "grad_output"): "dO",
    ("attention", "grad_scores"): "dS",
}

#: Axis name -> dimension, with operand-specific exceptions.
_DIMENSIONS = {
    "input_width": {"": -1},
    "output_width": {"": -1, "w": 0},
    "tokens": {"": 0},
    "head_dim": {"": -1},
    "keys": {"": 0, "P": -1, "dS": -1},
    "queries": {"": 0, "P": -2, "dS": -2},
}


@dataclass(frozen=True)
class DeclaredOperand:
    """One quantised slot of a captured tensor."""

    #: fprop, dgrad, wgrad, dgrad_q, ...
    product: str
    #: x, w, g, q, k, v, P, dO, dS.
    operand: str
    format: Format
    #: The dimension of the blocks, or of the Hadamard transform if the format has no blocks.
    dim: int
    #: Other arguments of `quantise`.
    options: Mapping[str, Any]
    #: The block of a preceding Hadamard transform, None without one, and the signs before it.
    hadamard_block: int | None = None
    signs: tuple[int, ...] | None = None
    #: Under delayed scaling, the amax of the previous iterations; None means the tensor's own.
    amax: float | None = None
    #: Of a routed expert, the sequence of each row, by which blocks along tokens lie
    #: (`quantexp.analysis.tensors.rows`).
    rows: Sequence[int] | None = None

    @property
    def left(self) -> bool:
        """Whether this is the left operand of its product."""
        shapes = (PRODUCTS[site].get(Product(self.product)) for site in PRODUCTS)
        return any(shape is not None and shape.left == self.operand for shape in shapes)

    @property
    def slot(self) -> str:
        """`x fprop`."""
        return f"{self.operand} {self.product}"

    @property
    def name(self) -> str:
        """The format's name, its scale rule or scaling, and other options: `mxfp4_e2m1 floor stochastic`."""
        rule = self.options.get("scale_rule") or self.options.get("scaling")
        stochastic = "stochastic" if self.options.get("rounding") == "stochastic" else None
        transform = "Hadamard" if self.hadamard_block is not None else None
        words = (self.format.name, rule, stochastic, transform)
        return " ".join(str(word) for word in words if word is not None)


def operand_called(layer_type: str, tensor: str) -> str | None:
    """The operand that a captured tensor is in its layer's products; None if it is none (outputs, weight gradients)."""
    return _OPERANDS.get((layer_type, tensor))


def tensor_called(operand: str) -> str:
    """The captured tensor that an operand is: `input` of x; dO and g are grad_output. A name that is none is itself."""
    return next((tensor for (_, tensor), name in _OPERANDS.items() if name == operand), operand)


def dimension_of(axis: str, operand: str) -> int:
    """The dimension of a captured operand for an axis of its product."""
    dimensions = _DIMENSIONS[axis]
    return dimensions.get(operand, dimensions[""])


def declared_operands(metadata: Mapping[str, Any]) -> list[DeclaredOperand]:
    """The quantised slots of a line of the manifest, in its order, without bf16 and reuse.

    Raises:
        CaptureError: a slot, format or axis of the manifest that is not known.
    """
    operand = operand_called(str(metadata.get("layer_type")), str(metadata.get("tensor")))
    declared = []
    for slot, settings in (metadata.get("formats") or {}).items():
        product, _, name = slot.rpartition(".")
        if name != operand or settings.get("format") in _UNQUANTISED or settings.get("reuse"):
            continue
        declared.append(_declared(metadata, slot, product.rpartition(".")[2], name, settings))
    return declared


def _declared(
    metadata: Mapping[str, Any], slot: str, product: str, operand: str, settings: Mapping[str, Any]
) -> DeclaredOperand:
    try:
        fmt = get_format(str(settings.get("format")))
    except ValueError as error:
        raise CaptureError(f"{_named(metadata, slot)}: {error}") from error
    known = fmt.options - {"amax"}
    options = {k: v for k, v in settings.items() if k in known and v is not None}
    is_blocked = fmt.block is not None or settings.get("hadamard_block") is not None
    dim = _dimension(metadata, slot, operand, settings.get("axis")) if is_blocked else -1
    signs = settings.get("signs")
    return DeclaredOperand(
        product,
        operand,
        fmt,
        dim,
        options,
        hadamard_block=settings.get("hadamard_block"),
        signs=None if signs is None else tuple(signs),
        amax=settings.get("amax"),
        rows=metadata.get(ROW_SEQUENCES),
    )


def _dimension(metadata: Mapping[str, Any], slot: str, operand: str, axis: object) -> int:
    if isinstance(axis, int):
        return axis
    if axis not in _DIMENSIONS:
        raise CaptureError(
            f"{_named(metadata, slot)}: axis must be one of "
            f"{', '.join(_DIMENSIONS)} or a dimension, got {axis!r}"
        )
    return dimension_of(str(axis), operand)


def _named(metadata: Mapping[str, Any], slot: str) -> str:
    return f"{Place.of(metadata).label}, slot {slot} of the manifest"
