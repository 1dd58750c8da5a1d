"""Checks a line of the manifest against the values that it names, and against their own metadata.

    a .pt file     the dtype, shape and bytes of its tensor, and each key of its metadata
    a shard        the header's dtype, shape and offsets of the key
    both           the hash of the values, the name, and the statistics, computed again

A file of a folder without a manifest has no line: its own metadata are compared with its name and its values.

Counts, extremes and quantiles are equal bit by bit. A mean and the k-th central moment may differ by 1e-9 of the k-th
power of the largest magnitude: they are sums of float64 in an order that depends on the device and on its kernels.
Statistics cannot be computed again of a sample, which they do not describe, and of block scales, whose codes are
stored.
"""

from __future__ import annotations

import dataclasses
import math
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
from torch import Tensor

from quantexp.capture.check.lists import NAME, different_keys
from quantexp.capture.names import TensorName
from quantexp.capture.reader import CapturedTensor
from quantexp.capture.statistics.summary import statistics
from quantexp.capture.store.values import PLACE, has_hash, metadata_in
from quantexp.errors import CaptureError
from quantexp.model.safetensors import DTYPES, dtype_name
from quantexp.model.safetensors_header import Entry

#: The keys in which a weight's line of the backward pass differs from the metadata of its values.
_OF_THE_PASS = frozenset({"operation", "phase"})
#: A key that the metadata in a file has, and that of older scripts lacks.
_OF_OURS = "formats"
_TOLERANCE = 1e-9
_MOMENTS = ("mean", "std", "skew", "kurtosis")


def check_values(
    entry: CapturedTensor, headers: Mapping[str, Mapping[str, Entry]]
) -> tuple[bool | None, list[str]]:
    """Whether the values have the line's hash (None without one), and all that differs, in words.

    Args:
        entry: the first line of the values.
        headers: the headers of all shards that can be read.
    """
    line, hash_ = entry.metadata, entry.metadata.get("hash")
    try:
        values, differences = _read(entry, headers)
        is_intact = None if hash_ is None else has_hash(values, str(hash_))
    except CaptureError as error:
        return False, [str(error)]
    except OSError as error:
        return False, [f"{line.get('file')} cannot be read: {error.strerror}"]
    if is_intact is False:
        differences.append("other values than the manifest's hash")
    differences += [
        *_check_name(line),
        *_check_form(line, values),
        *_check_twin(line),
        *_check_statistics(line, values),
    ]
    return is_intact, differences


def check_unlisted(entry: CapturedTensor) -> list[str]:
    """What differs between the name, the metadata and the values of a file that no list names.

    Files of older scripts have other metadata, of which nothing is compared.
    """
    try:
        own, values = metadata_in(entry.path), entry.torch()
    except CaptureError as error:
        return [str(error)]
    except OSError as error:
        return [f"it cannot be read: {error.strerror}"]
    if _OF_OURS not in own:
        return [*_check_archive(entry.path)]
    name = {key: value for key, value in entry.metadata.items() if key in own.keys() - PLACE}
    different = different_keys(name, {key: own[key] for key in name}, frozenset())
    return [
        *_check_archive(entry.path),
        *([f"its name is that of another {', '.join(different)}"] if different else []),
        *_check_form(own, values),
        *_check_twin(own),
        *_check_statistics(own, values),
    ]


def _read(
    entry: CapturedTensor, headers: Mapping[str, Mapping[str, Entry]]
) -> tuple[Tensor, list[str]]:
    """The values, and what differs between the line and the metadata beside them."""
    if entry.metadata.get("key") is None:
        own = metadata_in(entry.path)
        differences = [*_check_archive(entry.path), *check_metadata(entry.metadata, own)]
    else:
        file = str(entry.metadata.get("file"))
        if file not in headers:
            raise CaptureError(
                f"its shard {file} cannot be read" if entry.path.exists() else f"{file} is missing"
            )
        differences = [*_check_entry(entry.metadata, headers[file])]
    return entry.torch(), differences


def _check_archive(path: Path) -> Iterator[str]:
    """What the values do not show: torch.load without a memory mapping reads the whole zip archive."""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                member = archive.testzip()
            if member is not None:
                yield f"its archive is damaged in {member}"
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        yield f"its archive is damaged: {error}"


def check_metadata(line: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    """Keys of a line that the metadata of its values lacks or has otherwise."""
    try:
        own = orjson.loads(orjson.dumps(own))
    except (TypeError, ValueError):
        yield "the file's metadata is not plain data"
        return
    if different := different_keys(line, own, PLACE):
        yield f"the metadata in the file differs in {', '.join(different)}"


def check_reference(line: Mapping[str, Any], first: Mapping[str, Any]) -> Iterator[str]:
    """What differs between a later line of the same values and the first one."""
    if different := different_keys(line, first, _OF_THE_PASS):
        yield f"it differs from the first line of its file in {', '.join(different)}"


def _check_entry(line: Mapping[str, Any], header: Mapping[str, Entry]) -> Iterator[str]:
    key = str(line.get("key"))
    stored = header.get(key)
    if stored is None:
        raise CaptureError(f"{line.get('file')} has no tensor {key}")
    expected = {
        "dtype": DTYPES.get(str(line.get("dtype"))) == stored.dtype,
        "shape": line.get("shape") == list(stored.shape),
        "offsets": line.get("offsets") == [stored.start, stored.stop],
    }
    if different := [name for name, is_equal in expected.items() if not is_equal]:
        yield f"the header of its shard differs in {', '.join(different)}"


def _check_name(line: Mapping[str, Any]) -> Iterator[str]:
    name = str(line.get("key") or str(line.get("file")).removesuffix(".pt"))
    match = NAME.fullmatch(name)
    fields = {field.name: line.get(field.name) for field in dataclasses.fields(TensorName)}
    if match is None or None in fields.values():
        return  # a file of an older script
    of_line = TensorName(**fields)  # type: ignore[arg-type]
    counter = match["counter"]
    if of_line.file(match["timestamp"], int(counter)).removesuffix(".pt") != name:
        yield "its name is another tensor's"


def _check_form(line: Mapping[str, Any], values: Tensor) -> Iterator[str]:
    expected = {
        "dtype": dtype_name(values),
        "shape": list(values.shape),
        "bytes": values.numel() * values.element_size(),
    }
    for key, value in expected.items():
        if key in line and line[key] != value:
            yield f"its {key} is {line[key]}, that of the values {value}"


def _check_twin(line: Mapping[str, Any]) -> Iterator[str]:
    """An operand after quantisation: its slot is one of its module's, and its blocks run along one of its axes."""
    formats, shape = line.get("formats"), line.get("shape")
    if line.get("values") != "after" or not isinstance(formats, dict):
        return
    if line.get("slot") not in formats:
        yield f"its slot {line.get('slot')} is none of its formats"
    dim = line.get("dim")
    if not (isinstance(dim, int) and isinstance(shape, list) and dim < len(shape)):
        yield f"its dim {dim} is not an axis of its shape {shape}"


def _check_statistics(line: Mapping[str, Any], values: Tensor) -> Iterator[str]:
    recorded = line.get("statistics")
    if not isinstance(recorded, dict) or not recorded or "sample" in line:
        return
    if line.get("values") == "scale" or not values.dtype.is_floating_point:
        return
    computed = statistics(values)
    if wrong := [key for key in computed if not _agrees(key, recorded, computed)]:
        yield f"its statistics differ from those of its values in {', '.join(wrong)}"


def _agrees(key: str, recorded: Mapping[str, Any], computed: Mapping[str, Any]) -> bool:
    if key not in _MOMENTS:
        return key in recorded and bool(recorded[key] == orjson.loads(orjson.dumps(computed[key])))
    one, other = _moment(key, recorded), _moment(key, computed)
    if one is None or other is None:
        return one is other
    order = _MOMENTS.index(key) + 1
    return math.isclose(one, other, rel_tol=0, abs_tol=_TOLERANCE * computed["abs_max"] ** order)


def _moment(key: str, record: Mapping[str, Any]) -> float | None:
    """The mean, or the central moment that a statistic stands for."""
    value, std = record.get(key), record.get("std")
    if not isinstance(value, int | float) or not isinstance(std, int | float):
        return None
    power = {"mean": 0, "std": 1, "skew": 3, "kurtosis": 4}[key]
    try:
        return float(value) * float(std) ** power
    except OverflowError:
        return math.inf
