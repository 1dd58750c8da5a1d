"""Which options a slot may have: what changes gradients, what is of attention's softmax, what norms cannot have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from quantexp.errors import ConfigError
from quantexp.formats.spec import PRE_SCALE, QuantSpec
from quantexp.formats.types import Delta, Family, Rounding, ScaleRule, Scaling, Softmax
from quantexp.quant.choosing import Setting, chosen
from quantexp.quant.sites import DGRAD_W, FPROP_P, FPROP_W, FPROP_X, WGRAD_X, Product, Site, Slot
from quantexp.schema import Slot as SlotConfig

#: Options of attention's softmax. They do not depend on the format: each is that of the first setting that has it.
SOFTMAX_OPTIONS = ("unnormalised", "max_factor", "delta")


def with_softmax(spec: QuantSpec, settings: Sequence[Setting], slot: Slot) -> QuantSpec:
    """The specification with what of attention's softmax the slot multiplies, which P of the forward product says.

    The options of its site and of rules are for it alone.

    Raises:
        ConfigError: an option of another slot or site, or one that has no meaning beside the others.
    """
    if slot != FPROP_P:
        own = (
            {f"quant.{slot}"}
            if slot.site is Site.PV
            else {f"quant.{slot}", f"quant.{slot.site.value}"}
        )
        for setting in (each for each in settings if each.key in own):
            for name in SOFTMAX_OPTIONS:
                value = getattr(setting.slot, name)
                if value is not None:
                    raise ConfigError(
                        f"{setting.key}.{name} is for {FPROP_P}, got {_word(value)}; remove it, or set "
                        f"quant.{FPROP_P}.{name}"
                    )
        return spec
    options: dict[str, Setting] = {}
    for setting in settings:
        for name in SOFTMAX_OPTIONS:
            if getattr(setting.slot, name) is not None:
                options.setdefault(name, setting)
    values = {name: getattr(setting.slot, name) for name, setting in options.items()}
    unnormalised, factor = values.get("unnormalised", False), values.get("max_factor")
    if factor is not None and True not in [getattr(s.slot, SOFTMAX_OPTIONS[0]) for s in settings]:
        raise ConfigError(
            f"{options['max_factor'].key}.max_factor is the factor of the m of exp(S - m), got {_word(factor)} without "
            "unnormalised; set unnormalised=true, or remove it"
        )
    if unnormalised and spec.clip_gradient:
        raise ConfigError(
            f"quant.{slot}.clip_gradient has no meaning beside unnormalised: exp(S - m) saturates, and the gradient is "
            "that of P; remove one of them"
        )
    delta = chosen(options, "delta", Delta, Delta.P)
    return replace(spec, softmax=Softmax(unnormalised, factor if unnormalised else None, delta))


def _word(value: bool | float | str) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def clips_gradient(setting: Setting | None, spec: QuantSpec, slot: Slot) -> bool:
    """Whether to clip; a site's or a rule's setting applies to the forward product only."""
    if setting is None:
        return False
    assert isinstance(setting.slot, SlotConfig)
    if not setting.slot.clip_gradient:
        return False
    where = f"{setting.key}.clip_gradient"
    if slot.product is not Product.FPROP:
        if setting.key == f"quant.{slot}":
            raise ConfigError(
                f"{where} is for the operands of the forward product, whose quantisation is derived, got true; "
                f"remove it, or set quant.{slot.site.value}.fprop"
            )
        return False
    if spec.is_of_stored:
        raise ConfigError(
            f"{where} has no meaning for a stored copy, whose values saturate, not the tensor's, got true; remove it, "
            "or take of=high"
        )
    if not _can_saturate(spec):
        how = spec.scale_rule if "scale_rule" in spec.fmt.options else spec.scaling
        raise ConfigError(
            f"{where} has no meaning for {spec.fmt.name} with {how}, under which nothing saturates, got true; remove "
            "it"
        )
    return True


def power_of(setting: Setting | None, spec: QuantSpec, slot: Slot) -> float | None:
    """The power of DGE; a site's or a rule's setting applies to the weight in the forward product only."""
    if setting is None:
        return None
    assert isinstance(setting.slot, SlotConfig)
    where = f"{setting.key}.dge"
    if slot != FPROP_W:
        if setting.key == f"quant.{slot}":
            raise ConfigError(
                f"{where} is for the weights of the decoder's linear layers, got {setting.slot.dge:g}; remove it, or "
                "set quant.linear.fprop.w.dge"
            )
        return None
    reason = None
    if spec.fmt.family is Family.PYTHON:
        reason = f"{spec.fmt.name}, whose values are not known"
    elif spec.fmt.grid_scale is not None and not spec.fmt.grid_scale.is_of_amax:
        reason = (
            f"{spec.fmt.name}, whose blocks have more than a scale that follows from their amax"
        )
    elif spec.is_transformed:
        reason = "a Hadamard transform, whose elements are not the weight's"
    elif spec.is_pre_scaled:
        reason = "pre_scale, under which a part of the weight is rounded"
    elif spec.draws:
        reason = "stochastic rounding, whose mean has the derivative 1 already"
    if reason is not None:
        raise ConfigError(f"{where} has no meaning for {reason}; remove one of them")
    return setting.slot.dge


def check_clipping(resolved: Mapping[Slot, QuantSpec]) -> None:
    """Refuse to clip where transformed elements saturate, unless the gradient comes in the domain of the transform."""
    for slot, spec in resolved.items():
        if not (spec.clip_gradient and spec.is_transformed):
            continue
        backward = {FPROP_X: DGRAD_W, FPROP_W: WGRAD_X}.get(slot._replace(site=Site.LINEAR))
        where = f"quant.{slot}.clip_gradient"
        if backward is None:
            raise ConfigError(
                f"{where} has no meaning under a Hadamard transform in attention, whose gradients are not those of the "
                "transform, got true; remove one of them"
            )
        if resolved[backward._replace(site=slot.site)].copy is None:
            key = f"quant.{backward._replace(site=slot.site)}"
            raise ConfigError(
                f"{where} under a Hadamard transform needs the gradient of the transform, got {key} of high; set "
                f"{key}.of=forward or {key}.format=reuse, or remove one of them"
            )


def _can_saturate(spec: QuantSpec) -> bool:
    if spec.fmt.scale_rule is not None:
        return spec.scale_rule in (ScaleRule.FLOOR, ScaleRule.EVEN) and spec.pre_scale > PRE_SCALE
    blocks_saturate = spec.fmt.block is not None and spec.pre_scale > PRE_SCALE
    return blocks_saturate or spec.scaling in (Scaling.NONE, Scaling.DELAYED)


def check_norms(resolved: Mapping[Slot, QuantSpec]) -> None:
    """Refuse for norms what needs a matrix product, or numbers that follow from an operand's place in one.

    Raises:
        ConfigError: names the slot and the option.
    """
    for slot, spec in resolved.items():
        reasons = {
            "hadamard": spec.is_transformed and "only a matrix product undoes it",
            "pre_scale": spec.is_pre_scaled and "only a matrix product undoes it",
            "parts": spec.parts and "only a matrix product adds them up",
            "clip_gradient": spec.clip_gradient
            and "the gradients of a norm's gain and result go straight through",
            "rounding stochastic": spec.rounding is Rounding.STOCHASTIC
            and "random numbers follow from the place in a product's operand; take even",
            "scaling delayed": spec.scaling is Scaling.DELAYED
            and "amax histories are those of products' operands; take current or exact",
            f"format {spec.fmt.name}": spec.fmt.family is Family.PYTHON
            and "a class in Python may look at the whole tensor, which ranks divide",
            f"format {spec.fmt.name} with blocks of {spec.fmt.across} rows": spec.fmt.across > 1
            and "a gain is one row",
        }
        for option, why in reasons.items():
            if why:
                raise ConfigError(
                    f"quant.{slot} must have no {option}: {why}; remove it, or name other sites in the rule that "
                    "brings it"
                )
