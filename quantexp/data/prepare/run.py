"""Runs a preparation, or resumes it: every shard gets its output, then they are joined.

This process reads the input and cuts it into shards; others, as many as configured, work on them. Two shards for
each process are in memory, its current one and the next, so memory does not grow with the input. A worker process ends
when this process does, for any reason.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from quantexp.data.binary import pair_paths
from quantexp.data.prepare.finish import finish, publish
from quantexp.data.prepare.job import Job, TokenizerChoice
from quantexp.data.prepare.outputs import (
    Outputs,
    PartialFolder,
    Summary,
    make_output,
    read_summary,
    sole_user,
    write_rejected,
    writing,
)
from quantexp.data.prepare.progress import progress
from quantexp.data.prepare.shards import Shard, read_shards
from quantexp.data.prepare.work import Filters
from quantexp.data.prepared import Card, card_path, read_card
from quantexp.data.tokenizers.protocol import Tokenizer
from quantexp.errors import DataError
from quantexp.processes.with_parent import end_with_parent

#: Shards in memory per process: the one it works on, and the next.
_AHEAD = 2
_T = TypeVar("_T")


@dataclass(frozen=True)
class Work:
    """The work on a shard, which is done at the latest when `result` is called."""

    path: Path
    #: Bytes of all inputs up to its end, as stored.
    num_read: int
    result: Callable[[], Summary]
    #: Whether the output did not exist.
    is_new: bool


#: Starts the work on a shard for an output; returns the function that waits for it.
Start = Callable[[Shard, Path], Callable[[], Summary]]


@dataclass(frozen=True)
class Prepared:
    """The result of a preparation."""

    prefix: Path
    card: Card
    #: Whether it existed already.
    existed: bool = False


def prepare(job: Job, console: Console, *, force: bool = False) -> Prepared:
    """Runs the job, or resumes it after an interruption.

    A card identifies an earlier identical preparation. Another dataset at that prefix is replaced only with `force`,
    and is kept until the new one is complete.

    Raises:
        DataError: more bad records than allowed, a file that is truncated or cannot be read, a full disk, no document
            to keep, another dataset at the prefix, or another process preparing it.
    """
    folder = PartialFolder(Path(f"{job.prefix}.partial"), job.hash)
    if (card := _existing_card(job, folder, force)) is not None:
        return Prepared(job.prefix, card, existed=True)
    with sole_user(folder):
        if not folder.is_complete():
            with writing(folder.root):
                folder.begin()
            finish(job, folder, _make_outputs(job, folder, console))
        publish(folder, job.prefix)
    done = read_card(job.prefix)
    assert done is not None
    return Prepared(job.prefix, done)


def _existing_card(job: Job, folder: PartialFolder, force: bool) -> Card | None:
    """Returns the card if the job is done already.

    Raises:
        DataError: another dataset exists at the prefix.
    """
    card = read_card(job.prefix)
    if card is not None and card.job == job.hash:
        shutil.rmtree(folder.root, ignore_errors=True)
        return card
    exists = card is not None or any(path.exists() for path in pair_paths(job.prefix))
    if exists and not force and not folder.is_complete():
        what = "another preparation" if card is not None else "a pair that was not prepared here"
        raise DataError(
            f"{job.prefix} has {what} ({card_path(job.prefix).name}, .bin, .idx): give another "
            "dataset.path, or force=true to replace it"
        )
    return None


def _make_outputs(job: Job, folder: PartialFolder, console: Console) -> Outputs:
    """Makes the outputs that do not exist yet; returns all of them."""
    if any(folder.outputs.iterdir()):
        console.print(f"resuming: {folder.root}", soft_wrap=True, markup=False)
    outputs, num_new_read, num_new_tokens = Outputs(), 0, 0
    num_bytes = sum(item.num_bytes for item in job.inputs)
    with progress(num_bytes, console) as report, _workers(job) as start:
        for work in _ahead(_start_all(job, folder, start), _AHEAD * job.num_workers):
            summary = work.result()
            if work.is_new:
                num_new_read += work.num_read - outputs.num_read
                num_new_tokens += summary.tally.num_tokens
            outputs.add(work.path, summary, work.num_read)
            _refuse_too_many(job, folder, outputs, summary)
            report(work.num_read, num_new_read, outputs.tally.num_documents, num_new_tokens)
    return outputs


def _refuse_too_many(job: Job, folder: PartialFolder, outputs: Outputs, summary: Summary) -> None:
    if outputs.tally.num_rejected > job.max_rejected:
        with writing(folder.root):
            write_rejected(folder.too_many_rejected, outputs.paths)
        last = summary.rejected[-1]
        raise DataError(
            f"{outputs.tally.num_rejected:,} records cannot be read, more than "
            f"dataset.prepare.max_rejected={job.max_rejected}; the last: {last['file']}, line "
            f"{last['line']}: {last['reason']}; all of them in {folder.too_many_rejected}: fix the "
            "input, or raise the limit and run the same command again"
        )


def _start_all(job: Job, folder: PartialFolder, start: Start) -> Iterator[Work]:
    """Yields the work on each shard, in order, when it is started; nothing is started where the output exists."""
    num_read = 0
    for index, item in enumerate(job.inputs):
        for shard in read_shards(item):
            path = folder.output(index, shard)
            summary = read_summary(path)
            result = (lambda summary=summary: summary) if summary else start(shard, path)
            yield Work(path, num_read + shard.num_read, result, summary is None)
        num_read += item.num_bytes


def _ahead(items: Iterator[_T], number: int) -> Iterator[_T]:
    """Yields the items, having taken so many more from the iterator."""
    taken = deque(islice(items, number))
    for item in items:
        taken.append(item)
        yield taken.popleft()
    while taken:
        yield taken.popleft()


@contextmanager
def _workers(job: Job) -> Iterator[Start]:
    """Yields the function that starts the work on a shard: in this process if one suffices, else in others.

    Raises:
        DataError: one of them died.
    """
    if job.num_workers == 1:
        yield lambda shard, path: partial(make_output, shard, path, job.tokenizer, job.filters)
        return
    own = (job.choice, job.filters, os.getpid())
    executor = ProcessPoolExecutor(job.num_workers, get_context("spawn"), _initialise, own)

    def start(shard: Shard, path: Path) -> Callable[[], Summary]:
        # A process that this starts is deaf to Ctrl-C until `_initialise`, or it would print a traceback.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return executor.submit(_make_output, shard, path).result
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        yield start
    except BrokenProcessPool as error:
        raise DataError(
            "a process that tokenises died (out of memory?): run the same command again, it "
            "resumes where it stopped, perhaps with fewer dataset.prepare.num_workers"
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


#: The tokenizer and filters of a worker process.
_own: list[tuple[Tokenizer, Filters]] = []


def _initialise(choice: TokenizerChoice, filters: Filters, parent: int) -> None:
    """Initialises a worker process. Ctrl-C ends it at once: an output is complete, or is made again."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    end_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is one process per core
    _own.append((choice.load(), filters))


def _make_output(shard: Shard, path: Path) -> Summary:
    return make_output(shard, path, *_own[0])
