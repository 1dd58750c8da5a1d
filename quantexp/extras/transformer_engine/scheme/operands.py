"""What an operand is quantised to, in terms that a slot of a scheme and a recipe of Transformer Engine share.

Two slots with equal `Held` have the same grid and scales, whatever their formats are called: E4M3 in blocks of 128
under powers of two is `mxfp8` with `block: 128`, and so is `conf/format/fp8_1x128_pow2.yaml`. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from quantexp.formats.spec import QuantSpec
from quantexp.formats.types import BlockScaleKind, Family, Rounding, Scaling
from quantexp.formats.words import element_words, level_words
from quantexp.quant.slots import WORKING

#: Of a tensor's scale, by how it follows from the amax.
_TENSOR_SCALES = {
    Scaling.NONE: "none",
    Scaling.CURRENT: "a power of two a tensor",
    Scaling.EXACT: "max / amax of the tensor",
}


@dataclass(frozen=True)
class Held:
    """An operand's element, blocks, scales, transform and rounding, each as a message has it."""

    #: An element's name; `bf16` for the working precision.
    element: str
    block: str = "the tensor"
    scale: str = "none"
    transform: str = "none"
    rounding: str = Rounding.EVEN.value
    #: Of a block that lies alike along both axes it makes no difference whether the copy is the forward product's.
    copy: str = "of its own"
    options: str = "none"

    def differs(self, other: Held) -> str | None:
        """The first aspect in which they differ; None if they are equal."""
        names = (field.name for field in fields(self))
        return next((name for name in names if getattr(self, name) != getattr(other, name)), None)


def block_of(rows: int, elements: int) -> str:
    """`32`, or `128 x 128`."""
    return str(elements) if rows == 1 else f"{rows} x {elements}"


def power_of_two_scales(rule: str) -> str:
    """Block scales 2^s by a scale rule."""
    return f"powers of two by {rule}"


#: NVFP4's two levels, and float32 block scales.
NV_SCALES = f"ue4m3 under {_TENSOR_SCALES[Scaling.EXACT]}"
FP32_SCALES = "float32"
#: The transform of NVFP4's recipe.
RANDOM_HADAMARD = "random Hadamard in blocks of 16"
TENSOR_EXACT, TENSOR_POWER_OF_TWO = _TENSOR_SCALES[Scaling.EXACT], _TENSOR_SCALES[Scaling.CURRENT]


def delayed_scale(window: int | None) -> str:
    """A scale from earlier amaxes."""
    return f"delayed over {window}"


def held(spec: QuantSpec) -> Held:
    """What a slot's specification makes of an operand."""
    if not spec.quantised:
        return Held(WORKING)
    fmt = spec.fmt
    block = "the tensor" if fmt.block is None else block_of(fmt.across, spec.block)
    transform = "none"
    if spec.is_transformed:
        transform = f"{spec.hadamard.value} Hadamard in blocks of {spec.hadamard_block}"
    return Held(
        "a class of yours" if fmt.family is Family.PYTHON else element_words(fmt),
        block,
        _scale(spec),
        transform,
        spec.rounding.value,
        "the forward product's" if spec.reuse and fmt.depends_on_axis else "of its own",
        ", ".join(_options(spec)) or "none",
    )


def _scale(spec: QuantSpec) -> str:
    fmt = spec.fmt
    if fmt.block is None:
        return _tensor_scale(spec)
    if fmt.family is Family.MX:
        return power_of_two_scales(spec.scale_rule.value)
    if fmt.family is Family.NV:
        return f"ue4m3 under {_tensor_scale(spec)}"
    assert fmt.grid_scale is not None
    kind, rule = fmt.grid_scale.kind, fmt.grid_scale.rule.value
    if kind is BlockScaleKind.E8M0:
        return power_of_two_scales(rule) + level_words(fmt)
    name = kind.value if fmt.grid_scale.element is None else fmt.grid_scale.element.name
    name = {"fp32": FP32_SCALES}.get(name, name) + ("" if rule == "exact" else f" by {rule}")
    if fmt.grid_scale.candidates:
        name += f", to {' or '.join(f'{c:g}' for c in fmt.grid_scale.candidates)}"
    name += level_words(fmt)
    return name if spec.scaling is Scaling.NONE else f"{name} under {_tensor_scale(spec)}"


def _tensor_scale(spec: QuantSpec) -> str:
    if spec.scaling is Scaling.DELAYED:
        return delayed_scale(spec.window)
    words = _TENSOR_SCALES[spec.scaling]
    fmt = spec.fmt
    grid = fmt.block_scale or (fmt.grid_scale.element if fmt.grid_scale else None)
    full = fmt.element.max * (grid.max if grid else 1.0)
    return (
        words
        if spec.scaling is Scaling.NONE or spec.amax_target == full
        else f"{words}, amax to {spec.amax_target:g}"
    )


def _options(spec: QuantSpec) -> list[str]:
    options = {
        "saturate=false": not spec.saturate,
        "pre_scale": spec.is_pre_scaled,
        "clip_gradient": spec.clip_gradient,
        "dge": spec.dge is not None,
        "of=forward": spec.of is not None and not spec.is_of_stored,
        "of=a stored copy": spec.is_of_stored,
        "parts": bool(spec.parts),
    }
    return [name for name, is_set in options.items() if is_set]
