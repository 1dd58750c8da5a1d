"""All measures of one captured tensor, from its values or from its captured statistics.

Moments are those of the whole tensor: the capture's, or else computed here. Operands are judged by at most about
`Request.num_elements` elements in whole blocks, spread over the tensor, under the formats that the run declared, and
where it declared none under the requested formats. Formats with blocks are judged along both dimensions of the
matrix. Of statistics alone there is what the capture judged while the tensor passed (`capture.format`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from quantexp.analysis.measures.counted import CountedTensor
from quantexp.analysis.measures.operand import UnderFormat, axis_of, under_format
from quantexp.analysis.measures.outliers import Outliers, channel_dims, head_dims, outliers
from quantexp.analysis.tensors.largest import largest_tokens
from quantexp.analysis.tensors.operands import (
    ROW_SEQUENCES,
    DeclaredOperand,
    check_layout,
    declared_operands,
    slots_of_tensor,
    takes_copy,
)
from quantexp.analysis.tensors.place import Place
from quantexp.analysis.tensors.sample import keeps_blocks
from quantexp.capture.reader import CapturedTensor
from quantexp.capture.statistics.counts import from_json
from quantexp.capture.statistics.errors import Fidelity
from quantexp.capture.statistics.summary import statistics
from quantexp.errors import CaptureError
from quantexp.formats import finite_amax, get_format, resolve
from quantexp.formats.definitions.files import format_of_record
from quantexp.formats.layout import INPUT_DTYPES
from quantexp.quant.choosing import scheme_spec
from quantexp.quant.sites import Operand, Slot

#: The number of sampled elements of an operand.
NUM_ELEMENTS = 1 << 18
#: The formats for judging a run without quantised operands.
USUAL_FORMATS = ("mxfp8", "mxfp4", "hifp8")
_UNQUANTISED = frozenset({"bf16", "fp16", "fp32", "reuse", None})
#: What a note about an operand that is not judged begins with, where it has no slot, and how it goes on.
OTHER_AXIS, NOT_JUDGED = "the other axis", " not judged: "
_MOMENTS = ("mean", "std", "abs_max", "skew", "kurtosis", "zero_share")


@dataclass(frozen=True)
class Request:
    """The requested measures of every tensor."""

    #: Formats for operands in the working precision, with the options of the schemes.
    formats: tuple[str, ...] = ()
    num_elements: int = NUM_ELEMENTS
    #: Omits channels, heads, and the axis that no product reduces over.
    operands_only: bool = False

    def covers(self, other: Request) -> bool:
        """Whether its measures include those of another request: of all of its formats, of one, or of none."""
        is_part = len(other.formats) <= 1 and set(other.formats) <= set(self.formats)
        return (
            (is_part or other.formats == self.formats)
            and self.num_elements == other.num_elements
            and (other.operands_only or not self.operands_only)
        )


@dataclass(frozen=True)
class Measured:
    """The measures of one tensor; missing values are NaN."""

    place: Place
    shape: tuple[int, ...]
    dtype: str
    #: Whether the values were read, rather than statistics only.
    from_values: bool
    #: The number of elements of the whole tensor, and of NaN and Inf among them.
    count: int
    nonfinite: int
    mean: float = math.nan
    std: float = math.nan
    abs_max: float = math.nan
    skew: float = math.nan
    #: 3 for a normal distribution.
    kurtosis: float = math.nan
    zero_share: float = math.nan
    #: `below`, `above`, `first`, `counts`, as in the capture's statistics.
    log2_magnitude: Mapping[str, Any] | None = None
    channels: Outliers | None = None
    heads: Outliers | None = None
    operands: tuple[UnderFormat, ...] = ()
    #: Anomalies: empty, all zero, constant, NaN or Inf, not judged and why.
    notes: tuple[str, ...] = ()
    #: The tokens at the largest values (`quantexp.analysis.tensors.largest`).
    largest: tuple[dict[str, Any], ...] = ()

    @property
    def source(self) -> str:
        """`values` or `statistics`."""
        return "values" if self.from_values else "statistics"


def is_quantised(entry: CapturedTensor) -> bool:
    """Whether any slot of the tensor's module has a format."""
    slots = (entry.metadata.get("formats") or {}).values()
    return any(slot.get("format") not in _UNQUANTISED for slot in slots)


def usual_request(entries: Iterable[CapturedTensor]) -> Request:
    """All measures of a run's tensors: under the formats that the run declares, or else under the usual ones."""
    return Request(() if any(map(is_quantised, entries)) else USUAL_FORMATS)


def measure(
    entry: CapturedTensor, request: Request, counted: CountedTensor | None = None
) -> Measured:
    """The measures of a tensor from its values, which are read unless they have been `counted`.

    Raises:
        CaptureError: it has no values, or they cannot be read.
    """
    metadata = entry.metadata
    x = entry.torch() if counted is None else counted.raw
    place = Place.of(metadata)
    captured = metadata.get("statistics")
    if place.is_scale or not x.is_floating_point():
        bare = Measured(place, tuple(x.shape), _dtype(x), True, x.numel(), 0)
        recorded = captured if isinstance(captured, Mapping) else {}
        return _with_moments(bare, recorded, "codes of block scales, not judged")
    record = captured if isinstance(captured, Mapping) else _counted_record(x, counted)
    whole = Measured(place, tuple(x.shape), _dtype(x), True, 0, 0)
    whole = _with_moments(whole, record, *_oddities(record))
    if x.numel() == 0 or whole.count == whole.nonfinite:
        return whole
    source = place.source
    channels, heads = (
        None if dims is None or request.operands_only else outliers(x, dims)
        for dims in (
            channel_dims(place.layer_type, source, x.ndim),
            head_dims(place.layer_type, source, x.ndim),
        )
    )
    operands, notes = _operands(x, metadata, whole, request)
    return replace(
        whole,
        channels=channels,
        heads=heads,
        operands=operands,
        notes=whole.notes + notes,
        largest=largest_tokens(entry.folder, metadata, x),
    )


def _counted_record(x: Tensor, counted: CountedTensor | None) -> dict[str, Any]:
    return statistics(x) if counted is None else counted.record


def of_statistics(metadata: Mapping[str, Any]) -> Measured:
    """The measures of a tensor from its captured statistics.

    Raises:
        CaptureError: its statistics are of a format that is not known, or damaged.
    """
    record = metadata.get("statistics") or {}
    place = Place.of(metadata)
    shape = tuple(metadata.get("shape") or ())
    bare = Measured(place, shape, str(metadata.get("dtype", "")), False, 0, 0)
    whole = _with_moments(bare, record, *_oddities(record))
    judged = record.get("fidelity")
    try:
        return whole if judged is None else replace(whole, operands=(_of_record(judged),))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CaptureError(f"{place.label}: statistics that cannot be read: {error}") from error


def _with_moments(bare: Measured, record: Mapping[str, Any], *notes: str) -> Measured:
    mean, std, abs_max, skew, kurtosis, zero_share = (_number(record.get(n)) for n in _MOMENTS)
    return replace(
        bare,
        count=int(record.get("count", bare.count)),
        nonfinite=int(record.get("nonfinite", 0)),
        log2_magnitude=record.get("log2_magnitude"),
        mean=mean,
        std=std,
        abs_max=abs_max,
        skew=skew,
        kurtosis=kurtosis,
        zero_share=zero_share,
        notes=notes,
    )


def _oddities(record: Mapping[str, Any]) -> Iterator[str]:
    count, nonfinite = int(record.get("count", 0)), int(record.get("nonfinite", 0))
    if count == 0:
        yield "empty"
    elif nonfinite == count:
        yield "nothing finite"
    else:
        if nonfinite:
            yield f"{nonfinite} NaN or Inf"
        if record.get("zeros") == count:
            yield "all zero"
        elif record.get("min") == record.get("max") and count > 1:
            yield "constant"


def _operands(
    x: Tensor, metadata: Mapping[str, Any], whole: Measured, request: Request
) -> tuple[tuple[UnderFormat, ...], tuple[str, ...]]:
    """Judge every slot under its format, then the axis without a slot; returns also the reasons for missing results."""
    usable = x if x.dtype in INPUT_DTYPES else x.float()
    notes: list[str] = []
    try:
        slots = slots_of_tensor(metadata)
        if slots:
            check_layout(tuple(x.shape), slots[0])
        wanted = list(_wanted(metadata, slots, request))
    except CaptureError as error:
        return (), (f"not judged: {error}",)
    sampled = bool(metadata.get("sample"))
    known = sampled and math.isfinite(whole.abs_max)
    amax = usable.new_tensor(whole.abs_max).float() if known else finite_amax(usable)
    judged: dict[object, UnderFormat] = {}
    for slot, declared, is_declared in wanted:
        spec = declared.spec
        if not keeps_blocks(metadata, declared.dim, max(spec.block, spec.hadamard_block)):
            notes.append(f"{slot or OTHER_AXIS}{NOT_JUDGED}a sample without whole blocks")
            continue
        numbers = replace(spec.along_any_axis, window=None)
        key = (numbers, declared.dim, tuple(declared.draw.values()))
        if key not in judged:
            try:
                judged[key] = under_format(
                    usable,
                    declared,
                    amax,
                    slot=slot,
                    is_declared=is_declared,
                    limit=request.num_elements,
                )
            except (
                ValueError,
                CaptureError,
            ) as error:  # options that the format does not have, other rows
                notes.append(f"{slot or OTHER_AXIS}{NOT_JUDGED}{error}")
        elif slot:
            again = replace(judged[key], slot=slot, declared=is_declared)
            judged[(key, slot)] = again
    return tuple(judged.values()), tuple(dict.fromkeys(notes))


def _wanted(
    metadata: Mapping[str, Any], slots: list[Slot], request: Request
) -> Iterator[tuple[str, DeclaredOperand, bool]]:
    """Slot, operand, and whether the run declares it."""
    declared = declared_operands(metadata)
    taken = {(one.product, one.operand) for one in declared}
    wanted = [(f"{one.product}.{one.operand}", one, True) for one in declared]
    for slot in slots:
        if (slot.product.value, slot.operand) not in taken and not _takes_copy(metadata, slot):
            wanted += [
                (
                    f"{slot.product.value}.{slot.operand}",
                    replace(as_schemes_hold(slot, name), rows=metadata.get(ROW_SEQUENCES)),
                    False,
                )
                for name in request.formats
            ]
    yield from wanted
    if slots and slots[0].operand and not request.operands_only:
        yield from (("", one, False) for one in _other_axes(slots[0].operand, wanted))


def _takes_copy(metadata: Mapping[str, Any], slot: Slot) -> bool:
    """Whether the slot takes the forward copy, which is judged in the forward slot."""
    names = (
        f"{slot.product.value}.{slot.operand}",
        str(slot),
    )
    formats = metadata.get("formats") or {}
    return any(takes_copy(formats.get(name, {})) for name in names)


def as_schemes_hold(slot: Slot, format_name: str) -> DeclaredOperand:
    """An operand in a format with the schemes' default options."""
    fmt = get_format(format_name)
    dim = slot.dim if fmt.block is not None or fmt.depends_on_axis else -1
    spec = scheme_spec(fmt, slot.operand)
    return DeclaredOperand(slot.product.value, slot.operand, spec, dim)


def _other_axes(
    operand: Operand, wanted: list[tuple[str, DeclaredOperand, bool]]
) -> Iterator[DeclaredOperand]:
    """For each block format, the dimension of the matrix that no slot has as its block axis."""
    columns = -2 if operand in (Operand.P, Operand.DS) else 0
    by_format: dict[str, list[DeclaredOperand]] = {}
    for _, declared, _ in wanted:
        if declared.format.block is not None:
            by_format.setdefault(declared.name, []).append(declared)
    for same in by_format.values():
        dims = {one.dim for one in same}
        for dim in {-1, columns} - dims:
            yield replace(same[0], dim=dim)


def _of_record(judged: Mapping[str, Any]) -> UnderFormat:
    """The fidelity that the capture computed at run time."""
    fmt = format_of_record(judged)
    options = {k: judged[k] for k in ("scale_rule", "scaling") if judged.get(k) is not None}
    declared = DeclaredOperand("", "", resolve(fmt, **options), int(judged["axis"]))
    names = ("sqnr_db", "underflow_share", "saturated_share", "mse", "cosine")
    numbers = {name: _number(judged.get(name)) for name in names}
    if judged.get("noise") == 0 and judged.get("signal"):
        numbers["sqnr_db"] = math.inf
    exponents, zero_blocks = from_json(judged.get("scale_exponents")).without(_ZERO_BLOCK)
    return UnderFormat(
        "",
        declared.name,
        axis_of(declared),
        False,
        0,
        Fidelity(**numbers),
        exponents,
        zero_blocks,
        int(judged.get("nan_blocks") or 0),
    )


#: The exponent of E8M0's byte 0, the scale of zero blocks.
_ZERO_BLOCK = -127


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
