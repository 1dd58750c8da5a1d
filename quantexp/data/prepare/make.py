"""Makes the outputs of shards: this process reads the inputs and cuts them, others, as many as configured, work.

Two shards for each process are in memory, its current one and the next, so memory does not grow with the input. A
worker process ends when this process does, for any reason. Progress is a live line on a terminal, otherwise a line of
text at intervals.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from quantexp.data.prepare.job import Job, TokenizerChoice
from quantexp.data.prepare.outputs import (
    Listed,
    Outputs,
    Summary,
    make_output,
    read_listing,
    read_summary,
    unfinished,
    write_listing,
)
from quantexp.data.prepare.partial import PartialFolder
from quantexp.data.prepare.shards import Shard, read_shards
from quantexp.data.prepare.work import Filters
from quantexp.data.tokenizers.protocol import Tokenizer
from quantexp.errors import DataError
from quantexp.processes.with_parent import end_with_parent

#: Shards in memory per process: the one it works on, and the next.
_AHEAD = 2
_T = TypeVar("_T")


@dataclass(frozen=True)
class Work:
    """The work on a shard, which is done at the latest when `result` is called."""

    #: The input, counted from 0.
    index: int
    path: Path
    #: Bytes of that input up to the shard's end, and of all inputs before it, as stored.
    num_read: int
    num_before: int
    result: Callable[[], Summary]
    #: Whether the output did not exist.
    is_new: bool


#: Starts the work on a shard for an output; returns the function that waits for it.
Start = Callable[[Shard, Path], Callable[[], Summary]]


def make_outputs(
    job: Job, folder: PartialFolder, console: Console, among: Sequence[int] | None = None
) -> Outputs:
    """Makes the outputs that do not exist yet, of all inputs or of those in `among`; returns all outputs of these.

    It ends early once more records than `job.max_rejected` are unreadable.

    Raises:
        DataError: an input cannot be read, an output cannot be written, or a worker process died.
    """
    indices = range(len(job.inputs)) if among is None else among
    begun = {path.name.partition("-")[0] for path in folder.outputs.glob("*.npz")}
    if any(folder.listing(index).stem in begun for index in indices):
        console.print(f"resuming: {folder.root}", soft_wrap=True, markup=False)
    outputs, num_new_read, num_new_tokens = Outputs(), 0, 0
    num_bytes = sum(job.inputs[index].num_bytes for index in indices)
    with progress(num_bytes, console) as report, _workers(job) as start:
        works = _ahead(_start_all(job, folder, indices, start), _AHEAD * job.num_workers)
        for index, of_input in groupby(works, key=lambda work: work.index):
            listed = []
            for work in of_input:
                summary, num_read = work.result(), work.num_before + work.num_read
                if work.is_new:
                    num_new_read += num_read - outputs.num_read
                    num_new_tokens += summary.tally.num_tokens
                outputs.add(work.path, summary, num_read)
                if outputs.tally.num_rejected > job.max_rejected:
                    return outputs
                listed.append(Listed(work.path.name, work.num_read))
                report(num_read, num_new_read, outputs.tally.num_documents, num_new_tokens)
            if not folder.listing(index).exists():
                write_listing(folder, index, listed)
    for empty in unfinished(folder, indices):
        write_listing(folder, empty, [])
    return outputs


def _start_all(
    job: Job, folder: PartialFolder, indices: Sequence[int], start: Start
) -> Iterator[Work]:
    """Yields the work on each shard, in order, when it is started; nothing is started where the output exists."""
    num_before = 0
    for index in indices:
        item = job.inputs[index]
        listing = read_listing(folder, index)
        num_listed = 0
        for listed in listing or ():
            path = folder.outputs / listed.name
            summary = read_summary(path)
            if summary is None:
                break
            yield Work(index, path, listed.num_read, num_before, partial(_same, summary), False)
            num_listed += 1
        if listing is None or num_listed < len(listing):
            for shard in islice(read_shards(item), num_listed, None):
                path = folder.output(index, shard)
                summary = read_summary(path)
                result = partial(_same, summary) if summary else start(shard, path)
                yield Work(index, path, shard.num_read, num_before, result, summary is None)
        num_before += item.num_bytes


def _same(summary: Summary) -> Summary:
    return summary


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


#: Seconds between two lines without a terminal.
INTERVAL_S = 30.0

#: Receives the bytes read of all inputs, the bytes since this start, the documents, and the tokens since this start.
Report = Callable[[int, int, int, int], None]


@contextmanager
def progress(total: int, console: Console) -> Iterator[Report]:
    """Yields a function that reports progress.

    Args:
        total: bytes of all inputs as stored; 0 if unknown.
        console: where progress is shown.
    """
    if console.is_terminal:
        with _live(total, console) as report:
            yield report
    else:
        yield _lines(total, console)


@contextmanager
def _live(total: int, console: Console) -> Iterator[Report]:
    columns = (
        TextColumn("preparing"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%" if total else "{task.fields[size]}"),
        TextColumn("{task.fields[words]}"),
        TimeRemainingColumn(),
    )
    start = time.monotonic()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total or None, words="", size="")

        def report(num_read: int, num_new: int, num_documents: int, num_tokens: int) -> None:
            words = _words(num_new, num_documents, num_tokens, time.monotonic() - start)
            bar.update(task, completed=num_read, words=words, size=decimal(num_read))

        yield report


def _lines(total: int, console: Console) -> Report:
    start = last = time.monotonic()

    def report(num_read: int, num_new: int, num_documents: int, num_tokens: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < INTERVAL_S:
            return
        last = now
        words = _words(num_new, num_documents, num_tokens, now - start)
        share = f"{num_read / total:.0%}, " if total else ""
        left = ""
        if total and num_new:
            left = f", {(total - num_read) * (now - start) / num_new / 60:.0f} min left"
        console.print(f"preparing: {share}{words}{left}", soft_wrap=True, markup=False)

    return report


def _words(num_read: int, num_documents: int, num_tokens: int, elapsed_s: float) -> str:
    rate = max(elapsed_s, 1e-3)
    return (
        f"{num_documents:,} documents, {num_tokens / rate:,.0f} tokens/s, "
        f"{decimal(int(num_read / rate))}/s"
    )
