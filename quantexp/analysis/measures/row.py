"""The row of a captured tensor in the table of measures, and its JSON; this is where a tensor is read.

In JSON, missing numbers are null, and infinite ones the text `inf` or `-inf`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from quantexp.analysis.measures.counted import CountedTensor, StatisticsOnly, count_values
from quantexp.analysis.measures.measured import (
    NOT_JUDGED,
    OTHER_AXIS,
    Measured,
    Request,
    measure,
    of_statistics,
)
from quantexp.analysis.measures.operand import Axis, UnderFormat
from quantexp.analysis.measures.outliers import Outliers
from quantexp.analysis.tensors.place import Place
from quantexp.capture.reader import CapturedTensor
from quantexp.capture.statistics.counts import from_json
from quantexp.capture.statistics.errors import Fidelity
from quantexp.errors import CaptureError
from quantexp.formats import get_format

#: Names of the numbers of a tensor, of its channels or heads, and of an operand.
TENSOR = (
    *("dtype", "count", "nonfinite"),
    *("mean", "std", "abs_max", "skew", "kurtosis", "zero_share"),
)
OUTLIERS = ("num_groups", "amax_ratio", "largest", "top_energy_share")
OPERAND = ("slot", "format", "axis", "declared", "num_elements", *Fidelity._fields)


@dataclass(frozen=True)
class Wanted:
    """The measures that a command takes its numbers from."""

    #: The statistics of the stored values, which must have their hash.
    record: bool = False
    #: The rest; None for none.
    request: Request | None = None


@dataclass(frozen=True)
class TensorRow:
    """The measures of one tensor, as far as they were wanted."""

    #: Counts, moments and quantiles, with shape and dtype (`CountedTensor.record`).
    record: dict[str, Any] | None = None
    measured: Measured | None = None
    #: The request of `measured`.
    request: Request | None = None

    def has(self, wanted: Wanted) -> bool:
        """Whether these are all wanted measures."""
        if wanted.record and self.record is None:
            return False
        return wanted.request is None or (
            self.request is not None and self.request.covers(wanted.request)
        )

    def under(self, request: Request) -> Measured:
        """What the request alone would have given; the row has it."""
        assert self.measured is not None
        assert self.request is not None
        if request == self.request or not self.measured.from_values:
            return self.measured
        return _narrowed(self.measured, self.request, request)

    def updated(self, newer: TensorRow) -> TensorRow:
        """This row with the measures that a newer one has."""
        if newer.measured is None:
            newer = replace(newer, measured=self.measured, request=self.request)
        return newer if newer.record is not None else replace(newer, record=self.record)

    def json(self) -> dict[str, Any]:
        """The columns that there are."""
        content: dict[str, Any] = {} if self.record is None else {"record": self.record}
        if self.measured is not None and self.request is not None:
            content["measured"] = tensor_json(self.measured)
            content["request"] = asdict(self.request)
        return content

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> TensorRow:
        """The inverse of `json`."""
        record = content.get("record")
        row = cls(None if record is None else dict(record))
        if content.get("measured") is None:
            return row
        request = Request(**content["request"])
        request = replace(request, formats=tuple(request.formats))
        return replace(row, measured=measured_of_json(content["measured"]), request=request)


def read_row(
    entry: CapturedTensor, wanted: Wanted
) -> tuple[TensorRow, CountedTensor | StatisticsOnly | None]:
    """The wanted measures of a tensor, which is read once, and its values if they were counted.

    Raises:
        CaptureError: it is missing, damaged, differs from its hash where the record is wanted, or holds no numbers.
    """
    request = wanted.request
    if not entry.metadata.get("file"):
        bare = StatisticsOnly.of(entry)
        measured = None if request is None else of_statistics(entry.metadata)
        return TensorRow(bare.record, measured, request), bare
    try:
        counted = count_values(entry) if wanted.record else None
        measured = None if request is None else measure(entry, request, counted)
    except OSError as error:
        raise CaptureError(f"{entry.path} cannot be read: {error.strerror or error}") from error
    record = None if counted is None else counted.record
    return TensorRow(record, measured, request), counted


def _narrowed(measured: Measured, whole: Request, request: Request) -> Measured:
    """The part of the measures of a whole request that a request for fewer of them would have given."""
    names = {get_format(name).name for name in request.formats}
    operands = tuple(
        one
        for one in measured.operands
        if (one.slot or not request.operands_only)
        and (one.declared or one.format.split()[0] in names)
    )
    notes = {note: note.partition(NOT_JUDGED)[0] for note in measured.notes}
    others = {OTHER_AXIS} if request.operands_only else set()
    if request.formats != whole.formats:  # a note about a slot that is judged is another format's
        others.update(one.slot or OTHER_AXIS for one in operands)
    return replace(
        measured,
        operands=operands,
        notes=tuple(note for note, about in notes.items() if about not in others),
        channels=None if request.operands_only else measured.channels,
        heads=None if request.operands_only else measured.heads,
    )


def tensor_json(one: Measured) -> dict[str, Any]:
    """All measures of one tensor."""
    return {
        **asdict(one.place),
        "source": one.source,
        "shape": list(one.shape),
        **{name: _plain(getattr(one, name)) for name in TENSOR},
        "log2_magnitude": one.log2_magnitude,
        "channels": _outliers_json(one.channels),
        "heads": _outliers_json(one.heads),
        "operands": [_operand_json(operand) for operand in one.operands],
        "notes": list(one.notes),
        **({"largest": list(one.largest)} if one.largest else {}),
    }


def measured_of_json(content: Mapping[str, Any]) -> Measured:
    """The inverse of `tensor_json`."""
    place = Place(**{f.name: content[f.name] for f in fields(Place)})
    numbers: dict[str, Any] = {name: _number(content[name]) for name in TENSOR[3:]}
    return Measured(
        place,
        tuple(content["shape"]),
        content["dtype"],
        content["source"] == "values",
        content["count"],
        content["nonfinite"],
        **numbers,
        log2_magnitude=content["log2_magnitude"],
        channels=_outliers_of_json(content["channels"]),
        heads=_outliers_of_json(content["heads"]),
        operands=tuple(map(_operand_of_json, content["operands"])),
        notes=tuple(content["notes"]),
        largest=tuple(content.get("largest") or ()),
    )


def _outliers_of_json(content: Mapping[str, Any] | None) -> Outliers | None:
    if content is None:
        return None
    lists = {name: tuple(map(_number, content[name])) for name in ("profile", "ratios")}
    return Outliers(
        content["num_groups"],
        _number(content["amax_ratio"]),
        content["largest"],
        _number(content["top_energy_share"]),
        **lists,
    )


def _operand_of_json(content: Mapping[str, Any]) -> UnderFormat:
    codes = content["code_exponents"]
    return UnderFormat(
        content["slot"],
        content["format"],
        Axis(content["axis"]),
        content["declared"],
        content["num_elements"],
        Fidelity(**{name: _number(content[name]) for name in Fidelity._fields}),
        from_json(content["scale_exponents"]),
        content["zero_blocks"],
        content["nan_blocks"],
        None if codes is None else from_json(codes),
    )


def _number(value: float | str | None) -> float:
    return math.nan if value is None else float(value)


def _outliers_json(outliers: Outliers | None) -> dict[str, Any] | None:
    if outliers is None:
        return None
    lists = {name: [_plain(v) for v in getattr(outliers, name)] for name in ("profile", "ratios")}
    return {**{name: _plain(getattr(outliers, name)) for name in OUTLIERS}, **lists}


def _operand_json(operand: UnderFormat) -> dict[str, Any]:
    codes = operand.code_exponents
    return {
        **{name: _plain(getattr(operand, name)) for name in OPERAND[:5]},
        **{name: _plain(value) for name, value in operand.fidelity._asdict().items()},
        "scale_exponents": operand.scale_exponents.json(),
        "zero_blocks": operand.zero_blocks,
        "nan_blocks": operand.nan_blocks,
        "code_exponents": codes and codes.json(),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
