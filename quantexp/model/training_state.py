"""The training state of a checkpoint on disk: all that training goes on with, in shards, for any layout.

    state/state.json                what every rank has alike (`StateIndex`), and the names of the other files
    state/rank00003.safetensors     the pieces of rank 3 in fp32: `main/NAME`, `exp_avg/NAME` and `exp_avg_sq/NAME` by
                                    the global name of a parameter, of one that Muon moves `momentum/NAME` in place of
                                    both, and what some schemes keep (`KEPT`); the metadata says which elements
                                    they are

While a checkpoint without training state is written, such files hold `main/NAME` alone, in the working dtype.

Every element of every parameter is in one file. A reader takes the elements of its own pieces from the files that have
them, whatever the layout that wrote them. Importing this module imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from quantexp.errors import DataError, UnreadableError
from quantexp.model.huggingface.weights import DTYPES, Stored, fill
from quantexp.model.pieces import Copy, Piece, common
from quantexp.model.safetensors import content_of, dtype_name
from quantexp.model.safetensors_header import read_header_and_metadata
from quantexp.model.shards import Shard
from quantexp.reading.json_files import json_of, require_json
from quantexp.reading.typed import WrongTypeError, typed

if TYPE_CHECKING:
    from torch import Tensor

#: The form that this version writes and reads.
VERSION = 2
#: The tensors of a piece: main weights, and once the optimizer has stepped Adam's moments, or Muon's momentum.
MAIN, MOMENTS, MOMENTUM = "main", ("exp_avg", "exp_avg_sq"), "momentum"
#: What is kept of weights for `quant.optimizer.reset` while it observes them (weights, rounded weights, the paths of
#: both), and for `quant.optimizer.smooth`.
KEPT = {
    "reset": ("reset_w", "reset_rounded", "reset_path", "reset_rounded_path"),
    "smooth": ("curvature",),
}
_PIECES = "pieces"


class History(TypedDict):
    """An amax history as plain numbers."""

    window: int
    amaxes: list[float]


class PieceRecord(TypedDict):
    """A piece in a file's metadata."""

    shape: list[int]
    axis: int | None
    ranges: list[tuple[int, int]]
    flat: tuple[int, int]


@dataclass(frozen=True)
class LossScale:
    """The state of fp16's dynamic loss scale."""

    scale: float
    growth_tracker: int
    hysteresis_tracker: int


@dataclass(frozen=True)
class StateIndex:
    """state.json."""

    version: int
    iteration: int
    #: That of the run that wrote it, for people; nothing is read by it.
    layout: dict[str, Any]
    #: Steps of the learning-rate schedule, and of Adam.
    schedule_steps: int
    optimizer_steps: int
    loss_scale: LossScale | None
    #: By stream.
    amax_histories: dict[str, History]
    #: File -> its XXH3 hash, as in hashes.json.
    files: dict[str, str]
    #: Steps in a row, up to this iteration, that were left out because they were not finite.
    nonfinite: int = 0


def rank_file(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank{rank:05d}.safetensors"


def write_index(file: Path, index: StateIndex) -> None:
    """Write state.json.

    Raises:
        OSError: it cannot be written.
    """
    file.write_text(json.dumps(asdict(index), indent=1) + "\n")


def read_index(file: Path) -> StateIndex:
    """The content of state.json.

    Raises:
        DataError: it is missing, damaged or of another version.
    """
    try:
        index = require_json(file, StateIndex)
    except UnreadableError as error:
        raise DataError(f"{error}; start without training.start_optimizer") from error
    if index.version != VERSION:
        raise DataError(
            f"{file} has version {index.version}, and this quantexp reads version {VERSION}: use the one that wrote "
            "it, or start without training.start_optimizer"
        )
    return index


def metadata_of(pieces: Mapping[str, Piece]) -> dict[str, str]:
    """The metadata of a file with these pieces, by parameter."""
    records = {
        name: {**asdict(each.shard), "shape": each.shape, "flat": (each.start, each.stop)}
        for name, each in pieces.items()
    }
    return {_PIECES: json.dumps(records, separators=(",", ":"))}


@dataclass(frozen=True)
class SavedPieces:
    """The pieces of some parameters in the files of a training state."""

    #: Parameter -> its pieces, each with its tensors by kind (`main`).
    pieces: dict[str, list[tuple[Piece, dict[str, Stored]]]] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, files: Iterable[str], names: Collection[str]) -> SavedPieces:
        """Those of parameters with these names.

        Raises:
            DataError: a file is missing or damaged.
        """
        saved = cls({name: [] for name in names})
        for file in files:
            for name, piece, tensors in _pieces_in(folder / file, names):
                saved.pieces[name].append((piece, tensors))
        return saved

    def files(self, targets: Mapping[str, Piece]) -> set[Path]:
        """The files with elements of the target pieces."""
        return {
            tensors[MAIN].file
            for name, target in targets.items()
            for piece, tensors in self.pieces[name]
            if next(common(piece, target), None) is not None
        }

    def has(self, name: str, kind: str) -> bool:
        """Whether a tensor of a parameter was saved."""
        return all(kind in tensors for _, tensors in self.pieces[name])

    def read(self, name: str, target: Piece, kinds: Collection[str]) -> dict[str, Tensor]:
        """The tensors of a piece in fp32, flat, by kind.

        Raises:
            DataError: the files hold another parameter, or lack elements of it.
        """
        import torch

        values = {kind: torch.empty(target.numel, dtype=torch.float32) for kind in kinds}
        covered: list[Copy] = []
        for piece, tensors in self.pieces[name]:
            if piece.shape != target.shape:
                words = f"has shape {list(piece.shape)} there, and {list(target.shape)} here"
                raise DataError(f"{tensors[MAIN].file}: {name} {words}")
            copies = list(common(piece, target))
            covered += copies
            for kind in kinds if copies else ():
                _read(tensors, kind, name, copies, values[kind])
        _require_all(name, covered, target)
        return values


def _pieces_in(file: Path, names: Collection[str]) -> list[tuple[str, Piece, dict[str, Stored]]]:
    header, metadata = read_header_and_metadata(file)
    stored = {name: Stored(**vars(entry), file=file) for name, entry in header.items()}
    try:
        records = typed(json_of(metadata[_PIECES]), dict[str, PieceRecord])
        return [
            (name, *_piece(name, record, stored))
            for name, record in records.items()
            if name in names
        ]
    except (KeyError, ValueError, WrongTypeError) as error:
        raise DataError(f"{file} holds no training state: {error}") from error


def _piece(
    name: str, record: PieceRecord, stored: Mapping[str, Stored]
) -> tuple[Piece, dict[str, Stored]]:
    shard = Shard(record["axis"], tuple(record["ranges"]))
    piece = Piece(tuple(record["shape"]), shard, *record["flat"])
    tensors = {
        kind: stored[key]
        for kind in (MAIN, *MOMENTS, MOMENTUM, *chain(*KEPT.values()))
        if (key := f"{kind}/{name}") in stored
    }
    counts = {(each.stop - each.start) / DTYPES[each.dtype][1] for each in tensors.values()}
    if not piece.fits or MAIN not in tensors or counts != {piece.numel}:
        raise ValueError(f"the piece of {name} does not have the elements that it should")
    return piece, tensors


def _read(
    tensors: Mapping[str, Stored], kind: str, name: str, copies: Iterable[Copy], target: Tensor
) -> None:
    if kind not in tensors:
        raise DataError(f"{tensors[MAIN].file} lacks {kind}/{name}")
    import torch

    stored = tensors[kind]
    dtype, size = DTYPES[stored.dtype]
    values = target
    if dtype != dtype_name(target):
        values = torch.empty_like(target, dtype=getattr(torch, dtype))
    bytes_of = content_of(values)
    try:
        with stored.file.open("rb", buffering=0) as stream:
            for each in copies:
                stream.seek(stored.start + each.source * size)
                end = each.target + each.count
                fill(stream, bytes_of[each.target * size : end * size])
                if values is not target:
                    target[each.target : end] = values[each.target : end]
    except OSError as error:
        raise DataError(f"{stored.file} cannot be read: {error.strerror}") from error


def _require_all(name: str, covered: list[Copy], target: Piece) -> None:
    """Refuse a piece of which elements are missing or there twice."""
    end = 0
    for each in sorted(covered, key=lambda copy: copy.target):
        if each.target != end:
            break
        end += each.count
    if end != target.numel or sum(each.count for each in covered) != end:
        raise DataError(
            f"the training state does not hold every element of {name} once; start from another checkpoint, or without "
            "training.start_optimizer"
        )
