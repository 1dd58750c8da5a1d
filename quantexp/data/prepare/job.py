"""One preparation from its configuration to its card, started or resumed."""

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
from quantexp.data.prepare.finish import CardInfo, finish, publish
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
from quantexp.data.prepare.progress import Report, progress
from quantexp.data.prepare.work import ChunkResult, Filters
from quantexp.data.prepared import Card, TokenizerRecord, card_path, read_card
from quantexp.data.tokenizers.protocol import Tokenizer
from quantexp.errors import DataError
from quantexp.schema.dataset import DEFAULT_SPLIT, DatasetConfig, TokenizerKind

#: Incremented whenever the same input and configuration give other bytes.
PREPARE_VERSION = 1
#: Seconds of work that an interruption may lose, in addition to the chunks in progress.
SAVE_INTERVAL_S = 10.0
#: For a smaller input, starting other processes is not worthwhile.
_SMALL_BYTES = 4 * CHUNK_BYTES


@dataclass(frozen=True)
class Job:
    """A preparation: input, filters, tokenizer and destination."""

    prefix: Path
    inputs: list[Input]
    filters: Filters
    choice: TokenizerChoice
    tokenizer: Tokenizer
    card_info: CardInfo
    max_rejected: int
    num_workers: int
    #: The hash of everything that determines the result's bytes.
    hash: str

    @property
    def partial(self) -> PartialFolder:
        """The folder of the work in progress."""
        return PartialFolder(Path(f"{self.prefix}.partial"))


@dataclass(frozen=True)
class Prepared:
    """The result of a preparation."""

    prefix: Path
    card: Card
    #: Whether it existed already.
    existed: bool = False


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
        card_info=CardInfo(dataset.name, split, record, dataset.prepare.deduplicate, source),
        max_rejected=dataset.prepare.max_rejected,
        num_workers=_num_workers(dataset.prepare.num_workers, inputs),
        hash=hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16],
    )


def prepare(job: Job, console: Console, *, force: bool = False) -> Prepared:
    """Runs the job, or resumes it after an interruption.

    A card identifies an earlier identical preparation. Another dataset at that prefix is replaced only with `force`,
    and is kept until the new one is complete.

    Raises:
        DataError: more bad records than allowed, a file that is truncated or cannot be read, a full disk, no document
        to
            keep, another dataset at the prefix, or another process preparing it.
    """
    if (card := _existing_card(job, force)) is not None:
        return Prepared(job.prefix, card, existed=True)
    folder = job.partial
    with sole_user(folder):
        state = read_state(folder, job.hash)
        if not state.publishing:
            _read_and_finish(job, folder, state, console)
        publish(folder, job.prefix, job.card_info)
    done = read_card(job.prefix)
    assert done is not None
    return Prepared(job.prefix, done)


def _existing_card(job: Job, force: bool) -> Card | None:
    """Returns the card if the job is done already.

    Raises:
        DataError: another dataset exists at the prefix.
    """
    card = read_card(job.prefix)
    if card is not None and card.job == job.hash:
        shutil.rmtree(job.partial.root, ignore_errors=True)
        return card
    is_publishing = read_state(job.partial, job.hash).publishing
    exists = card is not None or any(path.exists() for path in pair_paths(job.prefix))
    if exists and not force and not is_publishing:
        what = "another preparation" if card is not None else "a pair that was not prepared here"
        raise DataError(
            f"{job.prefix} has {what} ({card_path(job.prefix).name}, .bin, .idx): give another "
            "dataset.path, or force=true to replace it"
        )
    return None


def _read_and_finish(job: Job, folder: PartialFolder, state: State, console: Console) -> None:
    if state.reached != Reached():
        console.print(f"resuming: {folder.root}", soft_wrap=True, markup=False)
    writer = Writer(folder, state)
    try:
        _read(job, writer, console)
    finally:
        try:
            writer.save()
        finally:
            writer.close()
    finish(folder, writer.state, job.card_info, job.tokenizer)
    writer.state.publishing = True
    writer.save_state()


def _read(job: Job, writer: Writer, console: Console) -> None:
    """Reads all inputs, from the writer's state on."""
    start, sizes = writer.state.reached, [item.num_bytes for item in job.inputs]
    saved, before = time.monotonic(), _counted(writer.state)[1]
    pool = workers(job.num_workers, job.choice, job.tokenizer, job.filters)
    with progress(sum(sizes), start.num_read, console) as report, pool as crew:
        for index, chunk, result in crew.results(_all_chunks(job, start)):
            _refuse_too_many(job, writer, job.inputs[index], result)
            reached = Reached(index, chunk.end, sum(sizes[:index]) + chunk.num_read)
            writer.append(job.inputs[index].name, result, reached)
            _report_progress(report, writer.state, before)
            if time.monotonic() - saved > SAVE_INTERVAL_S:
                writer.save()
                saved = time.monotonic()


def _all_chunks(job: Job, start: Reached) -> Iterator[tuple[int, Chunk]]:
    position = start.position
    for index in range(start.input, len(job.inputs)):
        for chunk in chunks(job.inputs[index], position):
            yield index, chunk
        position = Position()


def _refuse_too_many(job: Job, writer: Writer, item: Input, result: ChunkResult) -> None:
    number = writer.state.tally.num_rejected + len(result.rejected)
    if number > job.max_rejected:
        writer.list_rejected(item.name, result)
        last = result.rejected[-1]
        raise DataError(
            f"{number:,} records cannot be read, more than dataset.prepare.max_rejected="
            f"{job.max_rejected}; the last: {item.name}, line {last.place}: {last.reason}; all of them "
            f"in {writer.folder.refused}: fix the input, or raise the limit and run the same command again"
        )


def _report_progress(report: Report, state: State, tokens_before: int) -> None:
    num_documents, num_tokens = _counted(state)
    report(state.reached.num_read, num_documents, num_tokens - tokens_before)


def _counted(state: State) -> tuple[int, int]:
    """Returns the numbers of documents and tokens so far."""
    rows = state.tally.sources.values()
    return sum(row[0] for row in rows), sum(row[1] for row in rows)


def _bounds(split: str) -> tuple[float, float]:
    """Returns the bounds at which validation and test begin."""
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
