"""The operands of matrix products that a captured tensor was, the declared format of each, and the axis of its blocks.

`formats` in the manifest names every slot of a tensor's module: product.operand (`fprop.x`, `dgrad_q.k`),
with a site before it or not, and the axis that blocks run along in the product's words. Captured
tensors lie as Megatron has them:

    linear      x, g: tokens .. width      w: output width, input width
    attention   q, k, v, dO: tokens, batch, heads, head_dim      P, dS: batch, heads, queries, keys
    norm        y: tokens .. width         w: width

A tensor serves several products along different axes: a linear layer's input is fprop.x along the input width and
wgrad.x along tokens. Sequences are an axis of their own, so blocks along tokens lie within one.

The manifest says of which sequence each row of a routed expert's [n, width] is (`row_sequences`). Where blocks, or
those of a Hadamard transform, lie along tokens, the rows are laid out as in training (`quantexp.quant.rows`):
[L, B, width], the rows of each sequence one below the other, and zeros below those. The zeros are no elements of the
tensor: what is judged leaves them out.

    # n rows, B sequences, L rows of the sequence with the most
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from quantexp.analysis.tensors.place import Place, experts_as_one
from quantexp.capture.operands import EXPONENTIALS, SOURCES, slot_key
from quantexp.errors import CaptureError
from quantexp.formats import Axis, Format, Hadamard, QuantSpec, Rounding, resolve
from quantexp.formats.definitions.files import format_of_record
from quantexp.formats.transform import pieces
from quantexp.model.decoder import OUTPUT
from quantexp.quant.rows import Rows
from quantexp.quant.sites import FPROP_P, Operand, Site, Slot, captured_dim, slots_of
from quantexp.quant.step_state import Draw

#: The working precision and the reused forward copy, which are not quantisations.
_UNQUANTISED = frozenset({"bf16", "fp16", "fp32", "reuse"})

#: The layer types of sites that are not linear layers'.
_LAYER_TYPES = {Site.QK: "attention", Site.PV: "attention", Site.NORM: "norm"}
#: Layer type and captured tensor -> operand.
_OPERANDS = {
    (_LAYER_TYPES.get(site, "linear"), SOURCES[slot.operand]): slot.operand.value
    for site in Site
    for slot in slots_of(site)
} | {("attention", EXPONENTIALS): Operand.P.value}


@dataclass(frozen=True)
class DeclaredOperand:
    """One quantised slot of a captured tensor."""

    #: fprop, dgrad, wgrad, dgrad_q, ...
    product: str
    #: x, w, g, q, k, v, P, dO, dS.
    operand: str
    spec: QuantSpec
    #: The dimension of the blocks, or of the Hadamard transform if the format has no blocks.
    dim: int
    #: The signs before a random transform.
    signs: tuple[int, ...] | None = None
    #: Under delayed scaling, the amax of the previous iterations; None means the tensor's own.
    amax: float | None = None
    #: Under stochastic rounding, seed and offset of the random numbers.
    draw: Draw = field(default_factory=Draw)
    #: Of a routed expert, the sequence of each row, by which blocks along tokens lie
    #: (`LaidOut`).
    rows: Sequence[int] | None = None

    @property
    def format(self) -> Format:
        """The number format."""
        return self.spec.fmt

    @property
    def slot(self) -> str:
        """`x fprop`."""
        return f"{self.operand} {self.product}"

    @property
    def name(self) -> str:
        """The format's name, its scale rule or scaling, and other options: `mxfp4_e2m1 floor stochastic`."""
        options, spec = self.format.options, self.spec
        words = (
            self.format.name,
            spec.scale_rule if "scale_rule" in options else None,
            spec.scaling if "scaling" in options else None,
            "stochastic" if spec.rounding is Rounding.STOCHASTIC else None,
            "Hadamard" if spec.is_transformed else None,
        )
        return " ".join(str(word) for word in words if word is not None)


def operand_called(layer_type: str, tensor: str) -> str | None:
    """The operand that a captured tensor is in its layer's products; None if it is none (outputs, weight gradients)."""
    return _OPERANDS.get((layer_type, tensor))


def tensor_called(operand: str) -> str:
    """The captured tensor that an operand is: `input` of x; dO and g are grad_output. A name that is none is itself."""
    return next((tensor for name, tensor in SOURCES.items() if name == operand), operand)


def declared_operands(metadata: Mapping[str, Any]) -> list[DeclaredOperand]:
    """The slots of a line of the manifest that quantise its tensor, in its order.

    Without bf16, reuse and sums of parts, and without a slot that quantises the forward copy: its error is not that of
    one rounding.

    Raises:
        CaptureError: a slot, format or axis of the manifest that is not known.
    """
    operand = operand_called(str(metadata.get("layer_type")), str(metadata.get("tensor")))
    declared = []
    for slot, settings in (metadata.get("formats") or {}).items():
        product, _, name = slot.rpartition(".")
        if name != operand or settings.get("format") in _UNQUANTISED or takes_copy(settings):
            continue
        if settings.get("parts") or not is_taken(metadata, settings):
            continue
        declared.append(_declared(metadata, slot, product.rpartition(".")[2], name, settings))
    return declared


def is_taken(metadata: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether a slot of the manifest takes the tensor of the line: exp(S - m) or P."""
    return (metadata.get("tensor") == EXPONENTIALS) is bool(settings.get("unnormalised"))


def takes_copy(settings: Mapping[str, Any]) -> bool:
    """Whether a slot of the manifest multiplies, or quantises, the forward copy or a stored one, not the tensor."""
    return bool(settings.get("reuse") or settings.get("of"))


def _declared(
    metadata: Mapping[str, Any], slot: str, product: str, operand: str, settings: Mapping[str, Any]
) -> DeclaredOperand:
    try:
        spec = _spec(settings)
    except ValueError as error:
        raise CaptureError(f"{_named(metadata, slot)}: {error}") from error
    is_left = any(
        (each.product.value, each.operand) == (product, operand) and each.is_left
        for site in Site
        for each in slots_of(site)
    )
    signs = settings.get("signs")
    has_seed = settings.get("seed") is not None
    return DeclaredOperand(
        product,
        operand,
        replace(spec, left=is_left),
        _dimension(metadata, slot, operand, settings.get("axis")) if spec.has_blocks else -1,
        None if signs is None else tuple(signs),
        settings.get("amax"),
        Draw(seed=settings["seed"], offset=settings.get("offset") or 0) if has_seed else Draw(),
        metadata.get(ROW_SEQUENCES),
    )


def _spec(settings: Mapping[str, Any]) -> QuantSpec:
    """The specification of a slot of the manifest.

    Raises:
        ValueError: an unknown format or value.
    """
    fmt = format_of_record(settings)
    names = ("block", "scale_rule", "rounding", "saturate", "scaling", "amax_target", "pre_scale")
    options = {
        name: settings[name]
        for name in names
        if name in fmt.options and settings.get(name) is not None
    }
    spec = resolve(fmt, **options)
    block = settings.get("hadamard_block")
    if block is None:
        return spec
    hadamard = Hadamard(settings.get("hadamard") or Hadamard.DETERMINISTIC)
    return replace(spec, hadamard=hadamard, hadamard_block=block)


def _dimension(metadata: Mapping[str, Any], slot: str, operand: str, axis: object) -> int:
    if isinstance(axis, int):
        return axis
    is_norm = metadata.get("layer_type") == "norm"
    known = [each for each in Axis if (each is Axis.WIDTH) == is_norm]
    if axis not in known:
        raise CaptureError(
            f"{_named(metadata, slot)}: axis must be one of "
            f"{', '.join(known)} or a dimension, got {axis!r}"
        )
    return captured_dim(Operand(operand), Axis(str(axis)))


def _named(metadata: Mapping[str, Any], slot: str) -> str:
    return f"{Place.of(metadata).label}, slot {slot} of the manifest"


ROW_SEQUENCES = "row_sequences"


@dataclass(frozen=True)
class LaidOut:
    """Rows by sequence."""

    #: [L, B, width].
    x: Tensor
    #: The padding: bool, of x's shape.
    padding: Tensor


def rows_of(metadata: Mapping[str, Any], dim: int) -> Sequence[int] | None:
    """The sequence of each row, if blocks along a dimension of the tensor depend on it."""
    sequences = metadata.get(ROW_SEQUENCES)
    return None if sequences is None or dim != 0 else tuple(sequences)


def laid_out(x: Tensor, sequences: Sequence[int]) -> LaidOut:
    """Arrange the rows of a captured tensor as its blocks along tokens.

    Raises:
        CaptureError: other rows than the manifest says.
    """
    if x.ndim != 2 or x.shape[0] != len(sequences) or min(sequences, default=0) < 0:
        raise CaptureError(
            f"{ROW_SEQUENCES} must have the sequence of each row, got {len(sequences)} for the shape {list(x.shape)}"
        )
    rows = Rows(torch.tensor(sequences, dtype=torch.int64), max(sequences, default=0) + 1)
    taken = rows.laid_out(torch.ones(len(x), 1, dtype=torch.bool))
    laid = rows.laid_out(x)
    return LaidOut(laid, (~taken).expand_as(laid))


def padding_of_transform(padding: Tensor, dim: int, block: int) -> Tensor:
    """The elements of a Hadamard transform along a dimension that contain only padding."""
    first = padding.movedim(dim, 0).clone(memory_format=torch.contiguous_format)
    for start, stop, size in pieces(first.shape[0], block):
        blocks = first[start:stop].view(-1, size, *first.shape[1:])
        blocks.copy_(blocks.all(1, keepdim=True).expand_as(blocks))
    return first.movedim(0, dim)


def num_blocks_of_padding(padding: Tensor, dim: int, block: int) -> int:
    """The number of blocks along a dimension that contain only padding."""
    last = padding.movedim(dim, -1)
    parts = torch.split(last, block, dim=-1)
    return sum(int(part.all(-1).sum()) for part in parts)


#: Layer type -> the sites of its operands.
_SITES = {"linear": (Site.LINEAR,), "attention": (Site.QK, Site.PV), "norm": (Site.NORM,)}
#: The captured layouts of operands, as in messages, and their possible numbers of dimensions.
_LAYOUTS = {
    Operand.W: ("[output width, input width]", (2,)),
    Operand.Y: ("[tokens, sequences, width] or [tokens, sequences, heads, width]", (3, 4)),
    Operand.X: ("[tokens, sequences, width]", (2, 3)),
    Operand.G: ("[tokens, sequences, width]", (2, 3)),
    Operand.P: ("[sequences, heads, queries, keys]", (4,)),
    Operand.DS: ("[sequences, heads, queries, keys]", (4,)),
}
_HEADS_LAYOUT = ("[tokens, sequences, heads, head_dim]", (4,))


def slots_of_tensor(metadata: Mapping[str, Any]) -> list[Slot]:
    """The slots of a captured tensor, forward first; none for outputs and weight gradients."""
    layer_type = str(metadata.get("layer_type"))
    name = operand_called(layer_type, str(metadata.get("tensor")))
    is_output = metadata.get("module") == OUTPUT
    sites = (Site.OUTPUT,) if is_output else _SITES.get(layer_type, ())
    slots = [slot for site in sites for slot in slots_of(site) if slot.operand == name]
    of_p = (metadata.get("formats") or {}).get(slot_key(FPROP_P), {})
    if metadata.get("tensor") == EXPONENTIALS:
        return [FPROP_P]
    return [slot for slot in slots if slot != FPROP_P or is_taken(metadata, of_p)]


def module_of(metadata: Mapping[str, Any]) -> str:
    """The module, with all experts as one; the layer type if an old name does not have the module."""
    return experts_as_one(str(metadata.get("module") or metadata.get("layer_type")))


def check_layout(shape: tuple[int, ...], slot: Slot) -> None:
    """Refuse a tensor whose shape does not fit its operand's layout.

    Raises:
        CaptureError: another number of dimensions.
    """
    layout, allowed = _LAYOUTS.get(slot.operand, _HEADS_LAYOUT)
    if slot.site is Site.NORM and slot.operand is Operand.W:
        layout, allowed = "[width]", (1,)
    if len(shape) not in allowed:
        raise CaptureError(f"must be {layout} as captured, got the shape {list(shape)}")
