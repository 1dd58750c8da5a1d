"""The lists of a capture folder: their lines, the merge of the ranks' lists, and the shards' index.

Rank 0 appends to `manifest.jsonl`, `statistics.jsonl` and `tokens.jsonl`, rank N to `manifest.rankN.jsonl` and so on,
so the ranks need no lock. The lists are joined after any end of the run. It needs no torch, because the end of a SLURM
job has only seconds.

`tokens.jsonl` leads a value back to its token. A line holds the sample indices and token ids of an iteration's
micro-batch of one data-parallel rank, and the text of each of its distinct ids.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Required, TypedDict, cast

import xxhash

from quantexp.errors import CaptureError, UnreadableError
from quantexp.folders import sync
from quantexp.reading import json_files
from quantexp.reading.files import open_file
from quantexp.reading.typed import Count, Like, Rule
from quantexp.runs.status import write_json

MANIFEST = "manifest.jsonl"
STATISTICS = "statistics.jsonl"
TOKENS = "tokens.jsonl"
#: The shards' index, in the usual form of safetensors.
INDEX = "capture.safetensors.index.json"
#: The hash of each list, when the run ended.
HASHES = "hashes.json"

_PIECE = 1 << 22

LOG = logging.getLogger(__name__)


class Magnitudes(TypedDict, total=False):
    """The histogram over binary exponents."""

    below: Count | None
    above: Count | None
    first: Annotated[int, Rule("an exponent of two", lambda n: abs(n) < 1 << 15)] | None
    counts: list[Count]


class Statistics(TypedDict, total=False):
    """The statistics of a tensor; those of an empty one are None."""

    count: Count
    zeros: Count
    nonfinite: Count
    nan: Count
    inf: Count
    zero_share: float | None
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    abs_max: float | None
    skew: float | None
    kurtosis: float | None
    log2_magnitude: Magnitudes | None
    quantiles: dict[str, float | None] | None
    fidelity: dict[str, str | float | bool | list[Any] | dict[str, Any] | None] | None


class Cut(TypedDict):
    """The ranges [start, stop) of a part of a tensor along an axis."""

    axis: Count
    ranges: list[list[Count]]


class ShardRecord(TypedDict, total=False):
    """The part of a whole tensor (`quantexp.capture.parts`)."""

    whole: Required[list[Count]]
    cuts: Required[list[Cut]]
    partial: Annotated[int, Rule("a whole number from 2", lambda n: 2 <= n < 1 << 31)]


class ManifestLine(TypedDict, total=False):
    """A line of the manifest, or of the statistics; a tensor of an old collection has fewer keys."""

    module: str
    layer: Count
    layer_type: str
    operation: str
    phase: str
    component: str
    quant_type: str
    tensor: str
    iteration: Count
    #: None for a tensor of the whole iteration.
    micro_batch: Count | None
    rank: Count
    #: In a model-parallel layout: which of the ranks with the same part of the model, and the part of the tensor.
    data_rank: Count
    shard: Annotated[dict[str, Any], Like(ShardRecord)]
    loss_scale: float | None
    shape: Annotated[list[int], Like(list[Count] | None)]
    dtype: str
    #: Slot -> format and options.
    formats: dict[str, dict[str, Any]]
    statistics: Annotated[dict[str, Any], Like(Statistics)]
    #: before, after or scale: which of an operand's values these are; the slot, and what determined them.
    values: str
    slot: str
    source: str
    dim: Count
    tensor_scale: float | None
    #: The attention's path and scale, the first token of each document; the sequence of each of an expert's rows, and
    #: the state of each micro-batch that they are from, by slot.
    attention: str
    softmax_scale: float | None
    document_starts: list[list[Count]]
    row_sequences: list[int]
    row_sources: list[dict[str, dict[str, Any]]]
    sample: dict[str, Any]
    #: The file with the values, and in a shard the key and the bytes from the shard's start; None without values.
    file: str | None
    key: str
    offsets: Annotated[list[int], Like(list[Count] | None)]
    bytes: Count
    hash: str | None
    #: Why there are no values.
    left_out: str


class TokenLine(TypedDict, total=False):
    """A line of the list of tokens."""

    iteration: Count
    #: Among those of its rank, from 0.
    micro_batch: Count
    data_rank: Count
    #: The indices of the samples in the run's order, from 0.
    samples: list[Count]
    #: Their ids, [B, T].
    tokens: list[list[Count]]
    #: Id, as text, -> the token's text.
    texts: dict[str, str]


def finish_capture(folder: Path) -> None:
    """Join the ranks' lists, and write the shards' index and the hashes of the lists.

    The operation is idempotent. A full disk only prints a message, because the captures can be read without it.
    """
    try:
        join_parts(folder)
        _write_index(folder)
        _write_hashes(folder)
    except (OSError, UnreadableError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        LOG.warning("the lists of %s are left in parts: %s", folder, why)


def part_of(listing: Path, rank: int) -> Path:
    """The list of a rank."""
    return listing if rank == 0 else listing.with_name(f"{listing.stem}.rank{rank}.jsonl")


def join_parts(folder: Path) -> None:
    """Append every rank's lines to rank 0's list, and remove the ranks' lists.

    An incomplete line of a killed rank is dropped. After an interruption at any moment, the next call completes the
    work without duplicating lines.
    """
    for name in (MANIFEST, STATISTICS, TOKENS):
        listing = folder / name
        parts = sorted(folder.glob(f"{listing.stem}.rank*.jsonl"), key=_rank_of)
        if not parts:
            continue
        lines = dict.fromkeys(line for file in (listing, *parts) for line in _whole_lines(file))
        joined = listing.with_name(f".{name}.{os.getpid()}")
        joined.write_bytes(b"".join(lines))
        sync(joined)
        joined.replace(listing)
        sync(folder)  # before the only other copy of the lines is removed
        for part in parts:
            part.unlink()


def lines_of(
    file: Path, report: Callable[[UnreadableError], None] = lambda error: None
) -> Iterator[dict[str, Any]]:
    """The lines of a list, without the incomplete last line of a killed process; empty without a list.

    Each wrong line is reported and left out.
    """
    for line in json_files.json_lines(file, ManifestLine, report):
        yield cast(dict[str, Any], line)


def _rank_of(part: Path) -> int:
    return int(part.stem.rpartition(".rank")[2])


def _whole_lines(file: Path) -> Iterator[bytes]:
    for line in json_files.lines_of(file, _refuse):
        if line.is_ended:
            yield line.text


def _refuse(error: UnreadableError) -> None:
    raise error


def index_of(manifest: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The shards' index of the lines of a manifest."""
    lines = {str(line["key"]): line for line in manifest if line.get("key") is not None}
    total = sum(line.get("bytes") or 0 for line in lines.values())
    weight_map = {key: line.get("file") for key, line in lines.items()}
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def _write_index(folder: Path) -> None:
    index = index_of(lines_of(folder / MANIFEST))
    if index["weight_map"]:
        write_json(folder / INDEX, index)


def _write_hashes(folder: Path) -> None:
    lists = [folder / name for name in (MANIFEST, STATISTICS, TOKENS)]
    hashes = {file.name: digest_of(file) for file in lists if file.is_file()}
    if hashes:
        write_json(folder / HASHES, hashes)


def digest_of(file: Path) -> dict[str, Any]:
    """The number of lines and bytes of a list, and the XXH3 of its content.

    Raises:
        OSError, UnreadableError: the file cannot be read.
    """
    digest, num_lines, num_bytes = xxhash.xxh3_128(), 0, 0
    with open_file(file) as stream:
        while piece := stream.read(_PIECE):
            digest.update(piece)
            num_lines += piece.count(b"\n")
            num_bytes += len(piece)
    return {"lines": num_lines, "bytes": num_bytes, "xxh3_128": digest.hexdigest()}


class TokenList:
    """Appends to the list of one rank."""

    def __init__(self, folder: Path, rank: int, text_of: Callable[[int], str]) -> None:
        self._file, self._text_of = part_of(folder / TOKENS, rank), text_of

    def add(
        self,
        iteration: int,
        micro_batch: int,
        data_rank: int,
        samples: list[int],
        tokens: list[list[int]],
    ) -> None:
        """Add the tokens of a micro-batch.

        Raises:
            CaptureError: the list cannot be written.
        """
        distinct = sorted({token for sample in tokens for token in sample})
        line: TokenLine = {
            "iteration": iteration,
            "micro_batch": micro_batch,
            "data_rank": data_rank,
            "samples": samples,
            "tokens": tokens,
            "texts": {str(token): self._text_of(token) for token in distinct},
        }
        try:
            with self._file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
        except OSError as error:
            raise CaptureError(
                f"{self._file} cannot be written: {error.strerror or error}"
            ) from error
