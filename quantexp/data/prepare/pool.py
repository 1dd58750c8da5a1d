"""Processes chunks in several processes, and returns the results in the order of the chunks.

The number of chunks in progress just keeps every process busy, so memory does not grow with the input. A worker process
ends when this process does, for any reason.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Protocol, TypeVar

from quantexp.data.prepare.chunks import Chunk
from quantexp.data.prepare.work import ChunkResult, Filters, work
from quantexp.data.tokenizers.load import load_tokenizer
from quantexp.data.tokenizers.protocol import Tokenizer
from quantexp.errors import DataError
from quantexp.processes.with_parent import end_with_parent

#: Chunks in progress per process.
_AHEAD = 3
_T = TypeVar("_T")


@dataclass(frozen=True)
class TokenizerChoice:
    """A tokenizer's configuration, from which each process loads its own."""

    kind: str
    path: str | None
    eod: str | None
    pattern: str | None

    def load(self) -> Tokenizer:
        """Returns the tokenizer.

        Raises:
            DataError: it cannot be read.
        """
        return load_tokenizer(self.kind, self.path, eod=self.eod, pattern=self.pattern)


class Workers(Protocol):
    """The interface of both kinds of workers."""

    def results(
        self, chunks: Iterator[tuple[_T, Chunk]]
    ) -> Iterator[tuple[_T, Chunk, ChunkResult]]:
        """Yields each chunk's result, in order, with its label; the returned chunk has no data."""


class InProcess:
    """Processes chunks in this process."""

    def __init__(self, tokenizer: Tokenizer, filters: Filters) -> None:
        self.tokenizer, self.filters = tokenizer, filters

    def results(
        self, chunks: Iterator[tuple[_T, Chunk]]
    ) -> Iterator[tuple[_T, Chunk, ChunkResult]]:
        """Yields each chunk's result."""
        for label, chunk in chunks:
            yield label, chunk, work(chunk, self.tokenizer, self.filters)


class ProcessPool:
    """Processes chunks in other processes."""

    def __init__(self, executor: ProcessPoolExecutor, num_workers: int) -> None:
        self.executor, self.num_workers = executor, num_workers

    def results(
        self, chunks: Iterator[tuple[_T, Chunk]]
    ) -> Iterator[tuple[_T, Chunk, ChunkResult]]:
        """Yields each chunk's result, in order.

        Raises:
            DataError: a process died.
        """
        in_progress: deque[tuple[_T, Chunk, Future[ChunkResult]]] = deque()
        try:
            for label, chunk in chunks:
                future = self.executor.submit(_work, chunk)
                in_progress.append((label, replace(chunk, data=b""), future))
                if len(in_progress) > _AHEAD * self.num_workers:
                    yield _first(in_progress)
            while in_progress:
                yield _first(in_progress)
        except BrokenProcessPool as error:
            raise DataError(
                "a process that tokenises died (out of memory?): run the same command again, it "
                "resumes where it stopped, perhaps with fewer dataset.prepare.num_workers"
            ) from error


@contextmanager
def workers(
    num_workers: int, choice: TokenizerChoice, tokenizer: Tokenizer, filters: Filters
) -> Iterator[Workers]:
    """Yields the workers: this process if one suffices, else that many others."""
    if num_workers == 1:
        yield InProcess(tokenizer, filters)
        return
    executor = ProcessPoolExecutor(
        num_workers, get_context("spawn"), _initialise, (choice, filters, os.getpid())
    )
    try:
        yield ProcessPool(executor, num_workers)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _first(
    in_progress: deque[tuple[_T, Chunk, Future[ChunkResult]]],
) -> tuple[_T, Chunk, ChunkResult]:
    label, chunk, future = in_progress.popleft()
    return label, chunk, future.result()


#: The tokenizer and filters of a worker process.
_own: list[tuple[Tokenizer, Filters]] = []


def _initialise(choice: TokenizerChoice, filters: Filters, parent: int) -> None:
    """Initialises a worker process; interruptions are handled by its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is one process per core
    _own.append((choice.load(), filters))


def _work(chunk: Chunk) -> ChunkResult:
    tokenizer, filters = _own[0]
    return work(chunk, tokenizer, filters)
