"""Reads every captured tensor once: magnitudes, and the quantisation error of each operand under its format.

Magnitudes are those that the capture counted, of whole tensors. Operands are judged by a bounded part of the captured
values, in the formats that the run declared; where it declared none, in the one of the file's name, or `ASSUMED`. Of a
tensor without values there is what the capture judged while it passed (`capture.format`), and nothing where no format
was chosen.

What was found is kept beside the picture as JSON, so that drawing again, and the report, look at no value twice.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantexp.analysis.compare.gap import milestones
from quantexp.analysis.numerics.gather import USUAL_FORMATS, is_quantised
from quantexp.analysis.numerics.measured import Measured, Request, measure, of_statistics
from quantexp.analysis.numerics.operand import largest_scale_exponent
from quantexp.analysis.numerics.table import measured_of_json, tensor_json
from quantexp.analysis.tensors.inventory import Kind, kind_of
from quantexp.analysis.tensors.operands import declared_operands
from quantexp.analysis.tensors.place import Place
from quantexp.capture.lines import lists_of, torn_lines
from quantexp.capture.reader import Capture, CapturedTensor, open_capture
from quantexp.errors import CaptureError, UnreadableError
from quantexp.reading.json_files import read_json
from quantexp.runs.status import write_whole

#: The assumed format of operands whose format neither the metadata nor the file name gives.
ASSUMED = "mxfp8"
#: Maximum tensors; with more, evenly spaced iterations are read.
MOST_TENSORS = 20_000
_VERSION = 2
_NONFINITE = " NaN or Inf"


@dataclass(frozen=True)
class Look:
    """The results for one tensor."""

    measured: Measured
    kind: Kind
    #: Format of a slot -> scale exponent for the tensor's largest element.
    scales: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FirstLook:
    """The results for the tensors of one capture."""

    tensors: tuple[Look, ...] = ()
    #: Anomaly ("all zero", "missing") -> labels of its tensors.
    findings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: The iterations of the tensors, if they are not all that were captured.
    iterations: tuple[int, ...] | None = None

    def of_last_iteration(self) -> FirstLook:
        """The part of the last iteration that was captured in as many passes as any other; whole if there is one."""
        passes: dict[int, set[str]] = {}
        for look in self.tensors:
            place = look.measured.place
            passes.setdefault(place.iteration, set()).add(place.operation)
        if len(passes) <= 1:
            return self
        most = max(map(len, passes.values()))
        last = max(iteration for iteration, seen in passes.items() if len(seen) == most)
        shown = tuple(k for k in self.tensors if k.measured.place.iteration == last)
        return replace(self, tensors=shown, iterations=(last,))

    @property
    def has_values(self) -> bool:
        """Whether any tensor has captured values."""
        return any(look.measured.from_values for look in self.tensors)

    @property
    def is_judged(self) -> bool:
        """Whether any operand has a quantisation error."""
        return any(look.measured.operands for look in self.tensors)

    @property
    def is_assumed(self) -> bool:
        """Whether operands were judged although no format was declared."""
        operands = [operand for look in self.tensors for operand in look.measured.operands]
        return bool(operands) and all(o.slot and not o.declared for o in operands)


def captured_in(folder: Path) -> Capture:
    """The tensors of a capture folder, including those with statistics only; empty without captures."""
    try:
        return open_capture(folder, statistics=True)
    except CaptureError:
        return Capture(folder, [])


def first_look(capture: Capture, keep: Path | None = None, *, force: bool = False) -> FirstLook:
    """Read a capture; with `keep`, load or store the results in that file.

    What was left is not taken with `force`, and not where the lists, or a file with values, are no longer as they were.

    A tensor that cannot be read or judged is a finding. Tensors are looked at side by side, each on one core: torch's
    own threads would wait for each other at every one of many short operations.
    """
    entries, iterations = _with_room(capture)
    stored = (each.metadata for entry in entries for each in entry.stored)
    files = dict.fromkeys(str(line["file"]) for line in stored if line.get("file"))
    stamp = {
        "lists": _stamps(capture.folder),
        "entries": _digest(entries),
        "values": _stamps_of(capture.folder, files),
    }
    if keep is not None and not force and (kept := _kept(keep)) and kept[0] == stamp:
        return kept[1]
    is_declared = any(map(is_quantised, entries))
    num_threads = torch.get_num_threads()
    with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        looks = list(pool.map(partial(_look, is_declared), entries))
    torch.set_num_threads(num_threads)
    findings: dict[str, list[str]] = {}
    if torn := list(torn_lines(capture.folder)):
        findings["lines that a crash tore, left out"] = torn
    for entry, look in zip(entries, looks, strict=True):
        if isinstance(look, str):
            findings.setdefault(look, []).append(_name(entry))
            continue
        for what in _findings(look.measured):
            findings.setdefault(what, []).append(look.measured.place.label)
    result = FirstLook(tuple(k for k in looks if isinstance(k, Look)), findings, iterations)
    if keep is not None:
        keep.parent.mkdir(parents=True, exist_ok=True)
        write_whole(keep, _json(result, stamp))
    return result


def kept_look(keep: Path, folder: Path) -> FirstLook | None:
    """The stored results of an earlier `first_look`; None if there are none, or if the capture has changed."""
    if (kept := _kept(keep)) is None:
        return None
    stamp, look = kept
    is_same = stamp["lists"] == _stamps(folder) and stamp["values"] == _stamps_of(
        folder, stamp["values"]
    )
    return look if is_same else None


def _with_room(capture: Capture) -> tuple[list[CapturedTensor], tuple[int, ...] | None]:
    """Every stored value once, then tensors with statistics only, limited to evenly spaced iterations."""
    entries = [*capture.with_values(), *capture.described()]
    if len(entries) <= MOST_TENSORS:
        return entries, None
    of = [int(entry.metadata.get("iteration") or 0) for entry in entries]
    all_of_them = tuple(sorted(set(of)))
    each = -(-len(entries) // len(all_of_them))
    chosen = set(milestones(all_of_them, max(2, MOST_TENSORS // each)))
    kept = [entry for entry, iteration in zip(entries, of, strict=True) if iteration in chosen]
    return kept, tuple(sorted(chosen))


def _look(is_declared: bool, entry: CapturedTensor) -> Look | str:
    """The results for a tensor, or why there are none."""
    metadata = entry.metadata
    named = metadata.get("quant_type")
    assumed = named if named in USUAL_FORMATS else ASSUMED
    request = Request(() if is_declared else (assumed,), operands_only=True)
    if not metadata.get("file"):
        try:
            measured = of_statistics(metadata)
        except CaptureError:
            return "statistics that cannot be read"
    else:
        try:
            measured = measure(entry, request)
        except CaptureError:
            return _why_unreadable(entry)
        except OSError:
            return "missing"
    kind = kind_of(str(metadata.get("tensor")))
    return Look(measured, kind, _scales(metadata, measured.abs_max))


def _why_unreadable(entry: CapturedTensor) -> str:
    """Whether the file is corrupt, missing, or named by the manifest at a place that is not read; or lacks parts."""
    try:
        entry.require_complete()
    except CaptureError:
        return "incomplete"
    try:
        path = entry.path
    except CaptureError:
        return "not a file of the capture folder"
    try:
        return "corrupt" if path.is_file() else "missing"
    except OSError:  # a name longer than any file's
        return "missing"


def _findings(measured: Measured) -> Iterator[str]:
    if measured.place.is_scale:
        return
    for note in measured.notes:
        yield "NaN or Inf among the elements" if note.endswith(_NONFINITE) else note
    if any(one.fidelity.sqnr_db == -math.inf for one in measured.operands):
        yield "a value became infinite"


def _scales(metadata: Mapping[str, Any], abs_max: float) -> dict[str, int]:
    if not (math.isfinite(abs_max) and abs_max > 0):
        return {}
    try:
        declared = declared_operands(metadata)
    except CaptureError:
        return {}
    return {one.name: largest_scale_exponent(one, abs_max) for one in declared}


def _name(entry: CapturedTensor) -> str:
    """The file's name, or the label of a tensor with statistics only."""
    file = entry.metadata.get("key") or entry.metadata.get("file")
    return Path(str(file)).name if file else Place.of(entry.metadata).label


def _stamps(folder: Path) -> list[list[int]]:
    """Sizes and modification times of the lists."""
    stats = (file.stat() for file in lists_of(folder))
    return [[stat.st_size, stat.st_mtime_ns] for stat in stats]


def _stamps_of(folder: Path, files: Iterable[str]) -> dict[str, list[int] | None]:
    """Size and modification time of each file; None for a missing file."""
    return {file: _stamp(folder / file) for file in files}


def _stamp(file: Path) -> list[int] | None:
    try:
        stat = file.stat()
    except (OSError, ValueError):
        return None
    return [stat.st_size, stat.st_mtime_ns]


def _digest(entries: Iterable[CapturedTensor]) -> str:
    keys = ("file", "key", "module", "layer", "tensor", "iteration", "micro_batch", "rank")
    digest = hashlib.blake2b(digest_size=16)
    for entry in entries:
        digest.update(repr([entry.metadata.get(key) for key in keys]).encode())
    return digest.hexdigest()


def _json(content: FirstLook, stamp: Mapping[str, Any]) -> str:
    tensors = ",\n".join(
        json.dumps(
            {"kind": look.kind.name, "scales": dict(look.scales), **tensor_json(look.measured)}
        )
        for look in content.tensors
    )
    about = {
        "version": _VERSION,
        "of": stamp,
        "findings": {what: list(who) for what, who in content.findings.items()},
        "iterations": content.iterations,
    }
    return json.dumps(about)[:-1] + f', "tensors": [\n{tensors}\n]}}\n'


def _kept(keep: Path) -> tuple[dict[str, Any], FirstLook] | None:
    """The stored results and the stamps of their capture; None if the file holds anything else."""
    try:
        content = read_json(keep, dict[str, Any])
        if content["version"] != _VERSION or not isinstance(content["of"]["lists"], list):
            return None
        dict(content["of"]["values"])
        return content["of"], _of_json(content)
    except (
        UnreadableError,
        OSError,
        ArithmeticError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ):
        return None


def _of_json(content: Mapping[str, Any]) -> FirstLook:
    looks = (
        Look(measured_of_json(one), Kind[one["kind"]], one["scales"]) for one in content["tensors"]
    )
    iterations = content["iterations"]
    return FirstLook(
        tuple(looks), content["findings"], None if iterations is None else tuple(iterations)
    )
