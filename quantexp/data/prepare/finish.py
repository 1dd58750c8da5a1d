"""Finishes a preparation: drops duplicates, joins the parts, writes index, report and card, and moves the files.

It can be restarted from its beginning at any time: the parts are appended to and truncated, and nothing is removed
before the pair is complete. Then the files are moved, the card last.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quantexp.data.binary import pair_paths
from quantexp.data.index import blocks, id_type, write_index
from quantexp.data.prepare.duplicates import mark_first
from quantexp.data.prepare.parts import PartialFolder, State, writing
from quantexp.data.prepare.work import PARTS
from quantexp.data.prepared import (
    CARD_VERSION,
    Card,
    TokenizerRecord,
    card_json,
    card_path,
    tokenizer_folder,
)
from quantexp.data.tokenizers.protocol import Tokenizer
from quantexp.errors import DataError
from quantexp.runs.status import write_json

#: Bytes copied at a time.
_COPY = 1 << 22


@dataclass(frozen=True)
class CardInfo:
    """The fields of a card that come from the configuration."""

    dataset: str
    split: str
    tokenizer: TokenizerRecord
    deduplicate: bool
    #: As configured by the user.
    source: list[str]


def finish(folder: PartialFolder, state: State, card_info: CardInfo, tokenizer: Tokenizer) -> Card:
    """Creates the pair and its card in the partial folder.

    Raises:
        DataError: no document is left for training, or a file cannot be written.
    """
    dtype = id_type(tokenizer.vocab_size)
    with writing(folder.root):
        _cut_back(folder, state)
        num_duplicates = 0
        files = [(folder.ids(part), folder.lengths(part)) for part in PARTS]
        if card_info.deduplicate:
            for i, part in enumerate(PARTS):
                dropped = _without_duplicates(folder, part, dtype)
                num_duplicates += dropped
                files[i] = (folder.root / f"{part}.unique.bin", folder.root / f"{part}.unique")
        counts = [_count(lengths) for _, lengths in files]
        if counts[0][0] == 0:
            raise DataError(_nothing(folder, state, sum(count[0] for count in counts)))
        with files[0][0].open("ab") as out:
            for ids, _ in files[1:]:
                with ids.open("rb") as stream:
                    shutil.copyfileobj(stream, out, _COPY)
        write_index(folder.index, [lengths for _, lengths in files], dtype)
        if files[0][0] != folder.ids(PARTS[0]):
            files[0][0].replace(folder.root / "unique.bin")
        shutil.rmtree(folder.tokenizer, ignore_errors=True)
        if tokenizer.files:
            folder.tokenizer.mkdir()
        for file in tokenizer.files:
            shutil.copyfile(file, folder.tokenizer / file.name)
        card = Card(
            version=CARD_VERSION,
            dataset=card_info.dataset,
            job=state.job,
            tokenizer=card_info.tokenizer,
            split=card_info.split,
            num_documents=(counts[0][0], counts[1][0], counts[2][0]),
            num_tokens=(counts[0][1], counts[1][1], counts[2][1]),
            num_bytes=(_pair_ids(folder, card_info).stat().st_size, folder.index.stat().st_size),
            report=_report(state, card_info, num_duplicates, [lengths for _, lengths in files]),
        )
        write_json(folder.card, card_json(card))
    return card


def publish(folder: PartialFolder, prefix: Path, card_info: CardInfo) -> None:
    """Moves the result into place, the card last, and removes the partial folder.

    It can be restarted after an interruption. An older pair with that prefix is removed in the first step.
    """
    bin_path, idx_path = pair_paths(prefix)
    with writing(prefix):
        if (ids := _pair_ids(folder, card_info)).exists():
            card_path(prefix).unlink(missing_ok=True)
            idx_path.unlink(missing_ok=True)
            ids.replace(bin_path)
        if folder.tokenizer.exists():
            shutil.rmtree(tokenizer_folder(prefix), ignore_errors=True)
            folder.tokenizer.replace(tokenizer_folder(prefix))
        rejected = Path(f"{prefix}.rejected.jsonl")
        if folder.rejected.exists():
            rejected.unlink(missing_ok=True)
            if folder.rejected.stat().st_size:
                folder.rejected.replace(rejected)
        for source, target in ((folder.index, idx_path), (folder.card, card_path(prefix))):
            if source.exists():
                source.replace(target)
        shutil.rmtree(folder.root)


def _pair_ids(folder: PartialFolder, card_info: CardInfo) -> Path:
    """Returns the result's `.bin`."""
    return folder.root / "unique.bin" if card_info.deduplicate else folder.ids(PARTS[0])


def _cut_back(folder: PartialFolder, state: State) -> None:
    """Removes what an earlier, interrupted attempt of `finish` left."""
    (folder.root / "unique.bin").unlink(missing_ok=True)
    for path in folder.appended():
        with path.open("r+b") as stream:
            stream.truncate(state.sizes.get(path.name, 0))


def _without_duplicates(folder: PartialFolder, part: str, dtype: np.dtype[Any]) -> int:
    """Writes a part without copies of earlier documents; returns the number of copies."""
    marks = folder.root / f"{part}.marks"
    num_dropped = mark_first(folder.hashes(part), marks)
    with (
        folder.ids(part).open("rb") as ids,
        marks.open("rb") as first,
        (folder.root / f"{part}.unique.bin").open("wb") as new_ids,
        (folder.root / f"{part}.unique").open("wb") as new_lengths,
    ):
        for lengths in blocks([folder.lengths(part)]):
            kept = np.frombuffer(first.read(len(lengths)), np.uint8).astype(bool)
            new_lengths.write(lengths[kept].tobytes())
            for keep, count in _runs(kept, lengths):
                size = count * dtype.itemsize
                if keep:
                    _copy(ids, new_ids, size)
                else:
                    ids.seek(size, 1)
    marks.unlink()
    return num_dropped


def _runs(kept: np.ndarray, lengths: np.ndarray) -> Iterator[tuple[bool, int]]:
    """Yields, for each run of kept or dropped documents, which it is and its number of ids."""
    starts = np.flatnonzero(np.diff(kept, prepend=~kept[:1]))
    sums = np.add.reduceat(lengths.astype(np.int64), starts)
    for start, count in zip(starts, sums, strict=True):
        yield bool(kept[start]), int(count)


def _copy(source: Any, target: Any, size: int) -> None:
    while size:
        data = source.read(min(size, _COPY))
        target.write(data)
        size -= len(data)


def _count(lengths: Path) -> tuple[int, int]:
    """Returns the numbers of documents and tokens."""
    return lengths.stat().st_size // 4, sum(int(b.sum(dtype=np.int64)) for b in blocks([lengths]))


def _nothing(folder: PartialFolder, state: State, others: int) -> str:
    why = {**state.tally.left_out, "rejected": state.tally.num_rejected}
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in why.items() if count)
    if others:
        return (
            f"no document fell to training, {others:,} to validation and test: give more text, or "
            "another dataset.split"
        )
    return f"the input holds no document to keep ({reasons or 'it is empty'}); see dataset.prepare"


def _report(
    state: State, card_info: CardInfo, num_duplicates: int, lengths: list[Path]
) -> dict[str, Any]:
    tally = state.tally
    left_out = dict(sorted(tally.left_out.items()))
    if card_info.deduplicate:
        left_out["duplicate"] = num_duplicates
    return {
        "source": card_info.source,
        "num_input_bytes": state.reached.num_read,
        "num_chars": tally.num_chars,
        "num_text_bytes": tally.num_text_bytes,
        "left_out": left_out,
        "num_rejected": tally.num_rejected,
        "sources": json.loads(json.dumps(tally.sources)),
        "lengths": _histogram(lengths),
    }


def _histogram(lengths: list[Path]) -> dict[str, int]:
    """Returns the number of documents with up to 1, 2, 4, 8, ... tokens, by that bound."""
    counts = np.zeros(32, np.int64)
    for block in blocks(lengths):
        bins = np.ceil(np.log2(np.maximum(block, 1))).astype(np.int64)
        counts += np.bincount(bins, minlength=32)
    last = int(np.flatnonzero(counts).max(initial=0))
    return {str(1 << i): int(counts[i]) for i in range(last + 1)}
