"""Finishes a preparation: joins the outputs, drops duplicates, writes index, report and card, and moves the files.

The outputs are only read, so `finish` can be restarted from its beginning at any time. Then the files are moved, the
card last.
"""

import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from quantexp.data.binary import pair_paths
from quantexp.data.index import blocks, id_type, write_index
from quantexp.data.prepare.job import Job
from quantexp.data.prepare.outputs import (
    Outputs,
    first_rejected,
    read_arrays,
    write_rejected,
    writing,
)
from quantexp.data.prepare.partial import PartialFolder
from quantexp.data.prepare.work import HASH_BYTES, PARTS
from quantexp.data.prepared import CARD_VERSION, Card, card_path, hash_of, tokenizer_folder
from quantexp.errors import DataError
from quantexp.runs.status import write_json

#: Hashes sorted at a time (some 400 MB including the sort).
GROUP = 1 << 23
#: Hashes read at a time.
_BLOCK = 1 << 20


def finish(job: Job, folder: PartialFolder, outputs: Outputs) -> None:
    """Creates the result in the partial folder.

    Raises:
        DataError: no document is left for training, an output is damaged, or a file cannot be written.
    """
    dtype = id_type(job.tokenizer.vocab_size)
    bin_path, idx_path = pair_paths(folder.result)
    lengths_path = folder.root / "lengths"
    num_documents, num_tokens = [0, 0, 0], [0, 0, 0]
    digest = xxhash.xxh3_128()
    with writing(folder.root):
        with bin_path.open("wb") as ids_file, lengths_path.open("wb") as lengths_file:
            for i, part in enumerate(PARTS):
                for ids, lengths in _documents(job, folder, outputs.paths, part):
                    ids_file.write(ids.data)
                    digest.update(ids.data)
                    lengths_file.write(lengths.data)
                    num_documents[i] += len(lengths)
                    num_tokens[i] += len(ids)
        if num_documents[0] == 0:
            raise DataError(_nothing(outputs, sum(num_documents)))
        write_index(idx_path, [lengths_path], dtype)
        write_rejected(_rejected_path(folder.result), outputs.paths)
        copy = tokenizer_folder(folder.result)
        shutil.rmtree(copy, ignore_errors=True)
        if job.tokenizer.files:
            copy.mkdir()
        for file in job.tokenizer.files:
            shutil.copyfile(file, copy / file.name)
        card = Card(
            version=CARD_VERSION,
            dataset=job.filters.name,
            job=job.hash,
            tokenizer=job.tokenizer_record,
            split=job.split,
            num_documents=(num_documents[0], num_documents[1], num_documents[2]),
            num_tokens=(num_tokens[0], num_tokens[1], num_tokens[2]),
            num_bytes=(bin_path.stat().st_size, idx_path.stat().st_size),
            report=_report(job, outputs, sum(num_documents), lengths_path),
            hashes=(digest.hexdigest(), hash_of(idx_path)),
        )
        write_json(card_path(folder.result), asdict(card))


def publish(folder: PartialFolder, prefix: Path) -> None:
    """Moves the result into place, the card last, and removes the partial folder.

    It can be restarted after an interruption. An older pair with that prefix is removed in the first step.
    """
    new, (bin_path, idx_path) = folder.result, pair_paths(prefix)
    with writing(prefix):
        if pair_paths(new)[0].exists():
            card_path(prefix).unlink(missing_ok=True)
            idx_path.unlink(missing_ok=True)
            _rejected_path(prefix).unlink(missing_ok=True)
            pair_paths(new)[0].replace(bin_path)
        if tokenizer_folder(new).exists():
            shutil.rmtree(tokenizer_folder(prefix), ignore_errors=True)
            tokenizer_folder(new).replace(tokenizer_folder(prefix))
        for source, target in (
            (_rejected_path(new), _rejected_path(prefix)),
            (pair_paths(new)[1], idx_path),
            (card_path(new), card_path(prefix)),
        ):
            if source.exists():
                source.replace(target)
    # Another process that finds the card may remove the folder too, and NFS keeps the lock's file until it is closed.
    shutil.rmtree(folder.root, ignore_errors=True)


def _rejected_path(prefix: Path) -> Path:
    return Path(f"{prefix}.rejected.jsonl")


def _documents(
    job: Job, folder: PartialFolder, paths: list[Path], part: str
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the ids and lengths of a part, one output at a time, without copies of earlier documents."""
    names = (f"{part}_ids", f"{part}_lengths")
    if not job.filters.hashes:
        for path in paths:
            ids, lengths = read_arrays(path, *names)
            yield ids, lengths
        return
    hashes = folder.root / "hashes"
    with hashes.open("wb") as stream:
        for path in paths:
            stream.write(read_arrays(path, f"{part}_hashes")[0].data)
    is_first, begin = first_of_equal(hashes, folder.root / "is_first"), 0
    for path in paths:
        ids, lengths = read_arrays(path, *names)
        keep = is_first[begin : begin + len(lengths)]
        begin += len(lengths)
        yield ids[np.repeat(keep, lengths)], lengths[keep]


def first_of_equal(hashes: Path, marks: Path) -> np.ndarray:
    """Returns for each hash in a file whether no earlier one is equal; `marks` is a file for the result.

    Memory is bounded: the hashes are distributed over groups, equal ones to the same, and each group is sorted.
    """
    total = hashes.stat().st_size // HASH_BYTES
    if total == 0:
        return np.zeros(0, bool)
    content = np.memmap(hashes, "<u8", "r", shape=(total, 2))
    is_first = np.memmap(marks, bool, "w+", shape=(total,))
    num_groups = -(-total // GROUP)
    for group in range(num_groups):
        numbers, halves = _group(content, group, num_groups)
        order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: equal hashes keep their order
        ordered = halves[order]
        first = np.ones(len(order), bool)
        first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
        is_first[numbers[order]] = first
    return is_first


def _group(content: np.ndarray, group: int, num_groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices of a group's documents, and their hashes."""
    numbers, halves = [], []
    for start in range(0, len(content), _BLOCK):
        block = np.array(content[start : start + _BLOCK])
        own = np.flatnonzero(block[:, 1] % num_groups == group)
        numbers.append(own + start)
        halves.append(block[own])
    return np.concatenate(numbers), np.concatenate(halves)


def _nothing(outputs: Outputs, others: int) -> str:
    why = {**outputs.tally.left_out, "rejected": outputs.tally.num_rejected}
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in why.items() if count)
    if first := first_rejected(outputs.paths):
        reasons += f", the first: {first}"
    if others:
        return (
            f"no document fell to training, {others:,} to validation and test{reasons and f' ({reasons})'}: give "
            "more text, or another dataset.split"
        )
    return f"the input holds no document to keep ({reasons or 'it is empty'}); see dataset.prepare"


def _report(job: Job, outputs: Outputs, num_documents: int, lengths: Path) -> dict[str, Any]:
    tally = outputs.tally
    left_out = dict(sorted(tally.left_out.items()))
    if job.filters.hashes:
        left_out["duplicate"] = tally.num_documents - num_documents
    return {
        "source": job.source,
        "num_input_bytes": outputs.num_read,
        "num_chars": tally.num_chars,
        "num_text_bytes": tally.num_text_bytes,
        "left_out": left_out,
        "num_rejected": tally.num_rejected,
        "num_naming_specials": tally.num_naming_specials,
        "sources": tally.sources,
        "lengths": _histogram(lengths),
    }


def _histogram(lengths: Path) -> dict[str, int]:
    """Returns the number of documents with up to 1, 2, 4, 8, ... tokens, by that bound."""
    counts = np.zeros(32, np.int64)
    for block in blocks([lengths]):
        bins = np.ceil(np.log2(np.maximum(block, 1))).astype(np.int64)
        counts += np.bincount(bins, minlength=32)
    last = int(np.flatnonzero(counts).max(initial=0))
    return {str(1 << i): int(counts[i]) for i in range(last + 1)}
