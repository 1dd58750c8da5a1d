"""The precision map as JSON: in precision.json, plans, manifests and identities. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

from quantexp.formats.spec import LEFT_OUT, PRE_SCALE, Part, QuantSpec
from quantexp.formats.types import WHOLE_ROW, Delta, Family, Of, Take
from quantexp.quant.precision import Entry, configured


def entry_record(entry: Entry) -> dict[str, object]:
    """An entry in the form of the precision map's JSON."""
    return {
        "layer": entry.module.layer,
        "module": entry.module.name,
        "site": configured(entry.module.name, entry.slot).site.value,
        "product": entry.slot.product.value,
        "operand": entry.slot.operand.value,
        **spec_record(entry.spec),
    }


def spec_record(spec: QuantSpec) -> dict[str, object]:
    """A specification as JSON: Enums as their values, null for an option that the format does not have."""
    options = {
        "block": spec.scale_block,
        "scale_rule": spec.scale_rule.value,
        "rounding": spec.rounding.value,
        "scaling": spec.scaling.value,
        "saturate": spec.saturate,
        "amax_target": spec.amax_target if spec.is_scaled else None,
    }
    known = spec.fmt.options | ({"block"} if _has_plain_blocks(spec) else set())
    return {
        "format": spec.fmt.name,
        "axis": None if spec.axis is None else spec.axis.value,
        **{name: value if name in known else None for name, value in options.items()},
        "reuse": spec.reuse,
        **_later_options(spec),
    }


def _has_plain_blocks(spec: QuantSpec) -> bool:
    """Whether a declared format has blocks of a number of elements, and of one row."""
    fmt = spec.fmt
    return (
        fmt.family is Family.GRID and fmt.across == 1 and spec.block < WHOLE_ROW and bool(fmt.block)
    )


def _later_options(spec: QuantSpec) -> dict[str, object]:
    """Options recorded only if set, so that schemes without them keep their identity."""
    options = {
        "definition": spec.fmt.definition or None,
        "pre_scale": (spec.pre_scale == PRE_SCALE or spec.pre_scale)
        if spec.is_pre_scaled
        else None,
        "window": spec.window,
        "clip_gradient": spec.clip_gradient or None,
        "dge": spec.dge,
        "of": None
        if spec.of is None
        else spec.of.fmt.name
        if spec.is_of_stored
        else Of.FORWARD.value,
        "of_definition": spec.of.fmt.definition or None if spec.of and spec.is_of_stored else None,
        "hadamard": spec.hadamard.value if spec.is_transformed else None,
        "hadamard_block": spec.hadamard_block if spec.is_transformed else None,
        "parts": [part_record(part) for part in spec.parts] or None,
        "unnormalised": spec.softmax.unnormalised or None,
        "max_factor": spec.softmax.max_factor,
        "delta": None if spec.softmax.delta is Delta.P else spec.softmax.delta.value,
    }
    return {name: value for name, value in options.items() if value is not None}


def part_record(part: Part) -> dict[str, object]:
    """A part as JSON: what it takes, and its specification as `spec_record` has it."""
    options = {
        "along": None if part.along is None else part.along.value,
        "number": part.number,
        "share": part.share,
        "from_error": part.from_error or None,
    }
    taken = {name: value for name, value in options.items() if value is not None}
    rounding = {"format": LEFT_OUT} if part.spec is None else spec_record(part.spec)
    return {"take": part.take.value, **taken, **rounding}


def part_words(record: Mapping[str, object]) -> str:
    """A recorded part in words, without its format: `mean along tokens`."""
    words, share, number = str(record["take"]), record.get("share"), record.get("number")
    if words == Take.LOW_RANK:
        words = f"rank {number}" if share is None else f"rank {share} of full"
    elif words != Take.MEAN:
        words = f"largest {number} {words}" if share is None else f"largest {share} of {words}"
    along = f" along {record['along']}" if record.get("along") else ""
    return f"{words}{along}{' of the error' if record.get('from_error') else ''}"
