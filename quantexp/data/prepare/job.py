"""One preparation from its configuration to its card, begun or gone on with."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from quantexp.data.binary import pair_paths
from quantexp.data.prepare.chunks import CHUNK_BYTES, Chunk, Position, chunks
from quantexp.data.prepare.finish import Wanted, finish, publish
from quantexp.data.prepare.inputs import Input, find_inputs, inputs_hash
from quantexp.data.prepare.parts import (
    PartialFolder,
    Reached,
    State,
    Writer,
    read_state,
    sole_user,
)
from quantexp.data.prepare.pool import TokenizerChoice, workers
from quantexp.data.prepare.progress import Told, progress
from quantexp.data.prepare.work import Filters, Worked
from quantexp.data.prepared import Card, TokenizerRecord, card_path, read_card
from quantexp.data.tokenizers.protocol import Tokenizer
from quantexp.errors import DataError
from quantexp.schema.dataset import DEFAULT_SPLIT, DatasetConfig, TokenizerKind

#: Raised whenever the same input and configuration give other bytes.
PREPARE_VERSION = 1
#: Seconds of work that an interruption may cost, beside the chunks under way.
SAVE_INTERVAL_S = 10.0
#: An input smaller than this is not worth the start of other processes.
_SMALL_BYTES = 4 * CHUNK_BYTES


@dataclass(frozen=True)
class Job:
    """What is prepared, from what, with what, and where to."""

    prefix: Path
    inputs: list[Input]
    filters: Filters
    choice: TokenizerChoice
    tokenizer: Tokenizer
    wanted: Wanted
    max_rejected: int
    num_workers: int
    #: The hash of all that decides the result's bytes.
    hash: str

    @property
    def partial(self) -> PartialFolder:
        """Where it is worked on."""
        return PartialFolder(Path(f"{self.prefix}.partial"))


@dataclass(frozen=True)
class Prepared:
    """How it ended."""

    prefix: Path
    card: Card
    #: Whether it was there already.
    found: bool = False


def make_job(dataset: DatasetConfig) -> Job:
    """Returns the job of a configuration.

    Raises:
        DataError: no input, or a tokenizer that cannot be read.
    """
    inputs = find_inputs(dataset.source)
    kind = (dataset.tokenizer or TokenizerKind.huggingface).value
    choice = TokenizerChoice(kind, dataset.tokenizer_path, dataset.eod, dataset.tokenizer_pattern)
    tokenizer = choice.load()
    split = dataset.split or DEFAULT_SPLIT
    filters = Filters(
        name=dataset.name,
        bounds=_bounds(split),
        sources=dict(sorted((dataset.prepare.sources or {}).items())),
        min_chars=dataset.prepare.min_chars,
        max_chars=dataset.prepare.max_chars,
        hashes=dataset.prepare.deduplicate,
    )
    record = TokenizerRecord(
        kind=kind,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod,
        fingerprint=tokenizer.fingerprint(),
        file=tokenizer.files[0].name if tokenizer.files else None,
        eod_name=dataset.eod,
        pattern=dataset.tokenizer_pattern,
    )
    source = [dataset.source] if isinstance(dataset.source, str) else list(dataset.source)
    decides = [PREPARE_VERSION, inputs_hash(inputs), asdict(filters), record.fingerprint]
    return Job(
        prefix=Path(dataset.path or f"data/{dataset.name}").expanduser().absolute(),
        inputs=inputs,
        filters=filters,
        choice=choice,
        tokenizer=tokenizer,
        wanted=Wanted(dataset.name, split, record, dataset.prepare.deduplicate, source),
        max_rejected=dataset.prepare.max_rejected,
        num_workers=_num_workers(dataset.prepare.num_workers, inputs),
        hash=hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16],
    )


def prepare(job: Job, console: Console, *, force: bool = False) -> Prepared:
    """Does the job, or goes on with it where it was interrupted.

    What was prepared before is found by its card. Another dataset at that place is replaced with
    `force` alone, and stays until the new one is whole.

    Raises:
        DataError: bad input beyond the limit, a file that is cut short or cannot be read, a full
            disk, no document to keep, another dataset there, another process at work.
    """
    if (card := _there(job, force)) is not None:
        return Prepared(job.prefix, card, found=True)
    folder = job.partial
    with sole_user(folder):
        state = read_state(folder, job.hash)
        if not state.publishing:
            _read_and_finish(job, folder, state, console)
        publish(folder, job.prefix, job.wanted)
    done = read_card(job.prefix)
    assert done is not None
    return Prepared(job.prefix, done)


def _there(job: Job, force: bool) -> Card | None:
    """Returns the card where the job is done.

    Raises:
        DataError: another dataset is there.
    """
    card = read_card(job.prefix)
    if card is not None and card.job == job.hash:
        shutil.rmtree(job.partial.root, ignore_errors=True)
        return card
    being_moved = read_state(job.partial, job.hash).publishing
    there = card is not None or any(path.exists() for path in pair_paths(job.prefix))
    if there and not force and not being_moved:
        what = "another preparation" if card is not None else "a pair that was not prepared here"
        raise DataError(
            f"{job.prefix} has {what} ({card_path(job.prefix).name}, .bin, .idx): give another "
            "dataset.path, or force=true to replace it"
        )
    return None


def _read_and_finish(job: Job, folder: PartialFolder, state: State, console: Console) -> None:
    if state.reached != Reached():
        console.print(f"goes on where it was: {folder.root}", soft_wrap=True, markup=False)
    writer = Writer(folder, state)
    try:
        _read(job, writer, console)
    finally:
        try:
            writer.save()
        finally:
            writer.close()
    finish(folder, writer.state, job.wanted, job.tokenizer)
    writer.state.publishing = True
    writer.save_state()


def _read(job: Job, writer: Writer, console: Console) -> None:
    """Reads all inputs from the writer's state on."""
    start, sizes = writer.state.reached, [item.num_bytes for item in job.inputs]
    saved, before = time.monotonic(), _counted(writer.state)[1]
    pool = workers(job.num_workers, job.choice, job.tokenizer, job.filters)
    with progress(sum(sizes), start.num_read, console) as told, pool as crew:
        for index, chunk, worked in crew.results(_all_chunks(job, start)):
            _refuse_too_many(job, writer, job.inputs[index], worked)
            reached = Reached(index, chunk.end, sum(sizes[:index]) + chunk.num_read)
            writer.append(job.inputs[index].name, worked, reached)
            _tell(told, writer.state, before)
            if time.monotonic() - saved > SAVE_INTERVAL_S:
                writer.save()
                saved = time.monotonic()


def _all_chunks(job: Job, start: Reached) -> Iterator[tuple[int, Chunk]]:
    position = start.position
    for index in range(start.input, len(job.inputs)):
        for chunk in chunks(job.inputs[index], position):
            yield index, chunk
        position = Position()


def _refuse_too_many(job: Job, writer: Writer, item: Input, worked: Worked) -> None:
    number = writer.state.tally.num_rejected + len(worked.rejected)
    if number > job.max_rejected:
        writer.list_rejected(item.name, worked)
        last = worked.rejected[-1]
        raise DataError(
            f"{number:,} records cannot be read, more than dataset.prepare.max_rejected="
            f"{job.max_rejected}; the last: {item.name}, line {last.place}: {last.reason}; all of them "
            f"in {writer.folder.refused}: mend the input, or allow more and run the same again"
        )


def _tell(told: Told, state: State, tokens_before: int) -> None:
    num_documents, num_tokens = _counted(state)
    told(state.reached.num_read, num_documents, num_tokens - tokens_before)


def _counted(state: State) -> tuple[int, int]:
    """Returns how many documents and tokens there are so far."""
    rows = state.tally.sources.values()
    return sum(row[0] for row in rows), sum(row[1] for row in rows)


def _bounds(split: str) -> tuple[float, float]:
    """Returns where validation and test begin."""
    shares = [float(share) for share in split.split(",")]
    shares += [0.0] * (3 - len(shares))
    total = sum(shares)
    validation = shares[0] / total
    test = (shares[0] + shares[1]) / total if shares[2] else 1.0
    return (validation if shares[1] or shares[2] else 1.0), test


def _num_workers(configured: int | None, inputs: list[Input]) -> int:
    if configured is not None:
        return configured
    size = sum(item.num_bytes for item in inputs)
    if size and size < _SMALL_BYTES:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
