"""The name of a scheme, derived from its content, so that a label cannot contradict it.

A site that equals a shipped choice (`conf/quant/linear/mxfp8.yaml`) has that choice's name. The ten schemes are
compositions of such choices. Other compositions are named by their parts (`linear_mxfp8+pv_hifp8`); the name of a
composition that no shipped choice describes, rules included, ends in a hash of its content (`linear_custom~3f2a91`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache

from omegaconf import OmegaConf

from quantexp.folders import conf_dir
from quantexp.formats.spec import QuantSpec, get_format
from quantexp.formats.types import Format
from quantexp.quant.outside_products import (
    GRAD_REDUCE,
    moment_slots,
    reduced_slot,
    state_records,
    state_slots,
    weight_slots,
)
from quantexp.quant.records import spec_record
from quantexp.quant.sites import Site, Slot
from quantexp.quant.slot_checks import SOFTMAX_OPTIONS
from quantexp.quant.slots import (
    REUSE,
    WORKING,
    SiteConfig,
    declared_formats,
    resolve_site,
    site_configs,
)
from quantexp.schema import (
    Backend,
    GradReduce,
    LinearSite,
    OptimizerState,
    PvSite,
    QkSite,
    QuantConfig,
    Rule,
)

#: The formats of the ten schemes.
SCHEME_FORMATS = ("mxfp8", "mxfp4", "hifp8")

#: (linear, qk) choices of the ten schemes; pv, output and norm are none in every one.
SCHEMES: dict[str, tuple[str, str]] = {
    "bf16": ("none", "none"),
    **{f"FA_{f}": ("none", f) for f in SCHEME_FORMATS},
    **{f"linear_{f}": (f, "none") for f in SCHEME_FORMATS},
    **{f"FA_linear_{f}": (f, f) for f in SCHEME_FORMATS},
}

#: The choices of a site that quantise; only the first three belong to the ten schemes.
SITE_FORMATS = (*SCHEME_FORMATS, "mxfp6", "nvfp4", "fp8")
CHOICES = ("none", *SITE_FORMATS)

#: The sites with shipped choices.
_SITE_TYPES: dict[Site, type[LinearSite] | type[QkSite] | type[PvSite]] = {
    Site.LINEAR: LinearSite,
    Site.QK: QkSite,
    Site.PV: PvSite,
    Site.OUTPUT: LinearSite,
}


#: What precedes a scheme's derived name under a backend.
_PREFIXES = {
    Backend.emulated: "",
    Backend.transformer_engine: "te_",
    Backend.te_emulated: "te_emulated_",
}


#: The formats that a run quantises to at each site, under the scheme's rules.
InForce = Mapping[Site, frozenset[Format]]


def derived_name(quant: QuantConfig, sites: InForce | None = None) -> str:
    """The scheme's name, derived from its content; `te_` stands before one that Transformer Engine multiplies.

    Other sites than `sites` are not in the name, nor is the format of a site where rules replace all of it. None means
    that no rule does.
    """
    return _PREFIXES[quant.backend] + _name_of_slots(quant, sites)


def _name_of_slots(quant: QuantConfig, sites: InForce | None) -> str:
    declared = declared_formats(quant)
    choices = {
        site: _choice(site, config, declared) for site, config in site_configs(quant).items()
    }
    idle = [site for site in choices if sites is not None and site not in sites]
    is_changed = any(choices[site] != "none" for site in idle)
    choices |= dict.fromkeys(idle, "none")
    outside = _outside_parts(quant)
    none = choices[Site.PV] == choices[Site.OUTPUT] == choices[Site.NORM] == "none"
    if not quant.rules and not outside and none and not is_changed:
        for name, (linear, qk) in SCHEMES.items():
            if (choices[Site.LINEAR], choices[Site.QK]) == (linear, qk):
                return name
    configs = site_configs(quant)
    names = {
        site: choice or _own_format(site, configs[site], declared) or "custom"
        for site, choice in choices.items()
        if choice != "none"
    }
    for site in names:
        used = None if sites is None else sites[site]
        if used is not None and used.isdisjoint(_formats(site, configs[site], declared)):
            names[site] = _short(*used) if len(used) == 1 else "custom"
    parts = [f"{site.value}_{name}" for site, name in names.items()]
    of_rules = "bf16" if sites is not None and not sites else _name_of_rules(quant.rules, declared)
    name = "+".join([*parts, *outside]) or of_rules
    exact = not (quant.rules or is_changed) and None not in choices.values() and _is_plain(quant)
    return name if exact else f"{name}~{content_hash(quant)[:6]}"


def _name_of_rules(rules: Sequence[Rule], declared: Mapping[str, Format]) -> str:
    """The name of a scheme whose sites quantise nothing: `bf16`, unless a rule brings a format."""
    formats = {str(rule.format) for rule in rules if rule.format not in (None, WORKING, REUSE)}
    labels = {get_format(name, declared).label for name in formats}
    if any(getattr(rule, each) is not None for rule in rules for each in SOFTMAX_OPTIONS):
        return "rules"
    if not labels:
        return "bf16"
    return f"rules_{labels.pop()}" if len(labels) == 1 else "rules"


def content_hash(quant: QuantConfig) -> str:
    """Hex sha256 of the scheme's content, not its name: its sites' slots, its rules, what it rounds elsewhere.

    The slots of the output layer and of norms enter only if one is quantised, so that the hashes of schemes without
    them stay the same.
    """
    meaning = {
        "sites": {
            site.value: records
            for site, config in site_configs(quant).items()
            for records in (_records(site, config, declared_formats(quant)),)
            if site not in (Site.OUTPUT, Site.NORM)
            or any(r["format"] != WORKING for r in records.values())
        },
        "rules": [_rule(rule) for rule in quant.rules],
    }
    if of_rules := _definitions(quant):
        meaning["formats"] = of_rules
    if outside := state_records(quant):
        meaning["outside products"] = outside
    if quant.backend is not Backend.emulated:
        meaning["backend"] = {"name": quant.backend.value}
    if quant.recipe is not None:
        meaning["recipe"] = {"name": quant.recipe.value}
    return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()


#: Options of a rule that are hashed only if set, so that the hashes of schemes without them stay the same.
_LATER_OPTIONS = (
    "window",
    "pre_scale",
    "clip_gradient",
    "dge",
    "hadamard",
    "hadamard_block",
    "of",
    "parts",
    "when",
    *SOFTMAX_OPTIONS,
)


def _rule(rule: Rule) -> dict[str, object]:
    fields = dataclasses.asdict(rule)
    # Iterations that follow from a share differ with the number of iterations.
    del fields["iterations" if rule.share else "share"]
    if rule.when is not None:
        fields["when"]["measure"] = rule.when.measure.value
    return {k: v for k, v in fields.items() if v is not None or k not in _LATER_OPTIONS}


def _definitions(quant: QuantConfig) -> dict[str, str]:
    """The definitions of the declared formats that rules name."""
    declared = declared_formats(quant)
    names = {str(rule.format) for rule in quant.rules if rule.format not in (None, WORKING, REUSE)}
    formats = {name: get_format(name, declared) for name in sorted(names)}
    return {name: fmt.definition for name, fmt in formats.items() if fmt.definition}


def _outside_parts(quant: QuantConfig) -> list[str]:
    """What a scheme rounds outside of products: `adam_mxfp8`, `exp_avg_mxfp8`, `grad_reduce_mxfp8`."""
    moments = moment_slots(quant)
    named = [(slot.operand, slot) for slot in moments]
    of_adam = [slot for slot in moments if slot.product == "adam"]
    if len(of_adam) == 2 and of_adam[0].spec == of_adam[1].spec:
        named = [("adam", of_adam[0]), *named[2:]]
    named = [*((slot.product, slot) for slot in weight_slots(quant)), *named]
    if (reduced := reduced_slot(quant)) is not None:
        named.append((GRAD_REDUCE, reduced))
    return [f"{name}_{_short(slot.spec.fmt)}" for name, slot in named]


def _short(fmt: Format) -> str:
    return fmt.aliases[0] if fmt.aliases else fmt.label


def _is_plain(quant: QuantConfig) -> bool:
    """Whether format names alone say what is rounded outside of products: none is declared, and no option is set."""
    of_formats = QuantConfig(
        formats=quant.formats,
        optimizer=OptimizerState(*(type(o)(o.format) for o in vars(quant.optimizer).values())),
        grad_reduce=GradReduce(quant.grad_reduce.format),
    )
    slots = state_slots(quant)
    return slots == state_slots(of_formats) and not any(slot.spec.fmt.definition for slot in slots)


def _records(
    site: Site, config: SiteConfig, declared: Mapping[str, Format]
) -> dict[str, dict[str, object]]:
    return {
        f"{slot.product.value}.{slot.operand}": spec_record(spec)
        for slot, spec in resolve_site(site, config, declared=declared).items()
    }


def _own_format(site: Site, config: SiteConfig, declared: Mapping[str, Format]) -> str | None:
    """The format of every quantised slot of a site without a choice of that name; None if they differ."""
    formats = _formats(site, config, declared)
    own = next(iter(formats)) if len(formats) == 1 else None
    if own is None:
        return None
    if site not in _SITE_TYPES:
        return _short(own)
    return own.label if own.definition else None


def _formats(site: Site, config: SiteConfig, declared: Mapping[str, Format]) -> set[Format]:
    """The formats of a site's quantised slots, without rules."""
    slots = resolve_site(site, config, declared=declared).values()
    return {spec.fmt for spec in slots if spec.quantised}


def _choice(site: Site, config: SiteConfig, declared: Mapping[str, Format]) -> str | None:
    """The shipped choice that this site equals, or None."""
    slots = resolve_site(site, config, declared=declared)
    if not any(spec.quantised or not spec.softmax.is_stock for spec in slots.values()):
        return "none"
    if site not in _SITE_TYPES:
        return None
    return next((c for c in SITE_FORMATS if _shipped(site, c) == slots), None)


@cache
def _shipped(site: Site, choice: str) -> dict[Slot, QuantSpec]:
    file = conf_dir() / "quant" / site.value / f"{choice}.yaml"
    merged = OmegaConf.merge(OmegaConf.structured(_SITE_TYPES[site]), OmegaConf.load(file))
    config = OmegaConf.to_object(merged)
    assert isinstance(config, LinearSite | QkSite | PvSite)
    return resolve_site(site, config)
