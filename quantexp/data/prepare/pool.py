"""Chunks worked on by several processes, the results in the order of the chunks.

So many chunks are under way as keep every process busy, and no more: memory does not grow with the
input. A process ends when this one does, however that ends.
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
from quantexp.data.prepare.work import Filters, Worked, work
from quantexp.data.tokenizers.load import load_tokenizer
from quantexp.data.tokenizers.protocol import Tokenizer
from quantexp.errors import DataError
from quantexp.processes.with_parent import end_with_parent

#: Chunks under way for each process.
_AHEAD = 3
_T = TypeVar("_T")


@dataclass(frozen=True)
class TokenizerChoice:
    """A tokenizer as configured, from which each process loads its own."""

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
    """What works on chunks."""

    def results(self, chunks: Iterator[tuple[_T, Chunk]]) -> Iterator[tuple[_T, Chunk, Worked]]:
        """Yields each chunk's result, in order, with what came with it; the chunk has no data any more."""


class Alone:
    """This process does the work itself."""

    def __init__(self, tokenizer: Tokenizer, filters: Filters) -> None:
        self.tokenizer, self.filters = tokenizer, filters

    def results(self, chunks: Iterator[tuple[_T, Chunk]]) -> Iterator[tuple[_T, Chunk, Worked]]:
        """Yields each chunk's result."""
        for label, chunk in chunks:
            yield label, chunk, work(chunk, self.tokenizer, self.filters)


class Pool:
    """Other processes do."""

    def __init__(self, executor: ProcessPoolExecutor, num_workers: int) -> None:
        self.executor, self.num_workers = executor, num_workers

    def results(self, chunks: Iterator[tuple[_T, Chunk]]) -> Iterator[tuple[_T, Chunk, Worked]]:
        """Yields each chunk's result, in order.

        Raises:
            DataError: a process died.
        """
        under_way: deque[tuple[_T, Chunk, Future[Worked]]] = deque()
        try:
            for label, chunk in chunks:
                future = self.executor.submit(_work, chunk)
                under_way.append((label, replace(chunk, data=b""), future))
                if len(under_way) > _AHEAD * self.num_workers:
                    yield _first(under_way)
            while under_way:
                yield _first(under_way)
        except BrokenProcessPool as error:
            raise DataError(
                "a process that tokenises died (was memory short?): run the same command again, it "
                "goes on where it was, perhaps with fewer dataset.prepare.num_workers"
            ) from error


@contextmanager
def workers(
    num_workers: int, choice: TokenizerChoice, tokenizer: Tokenizer, filters: Filters
) -> Iterator[Workers]:
    """Yields what works on chunks: this process, if one is enough, else so many others."""
    if num_workers == 1:
        yield Alone(tokenizer, filters)
        return
    executor = ProcessPoolExecutor(
        num_workers, get_context("spawn"), _begin, (choice, filters, os.getpid())
    )
    try:
        yield Pool(executor, num_workers)
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _first(under_way: deque[tuple[_T, Chunk, Future[Worked]]]) -> tuple[_T, Chunk, Worked]:
    label, chunk, future = under_way.popleft()
    return label, chunk, future.result()


#: What a worker process has for all its chunks.
_own: list[tuple[Tokenizer, Filters]] = []


def _begin(choice: TokenizerChoice, filters: Filters, parent: int) -> None:
    """Prepares a worker process; an interruption is for the one that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each core
    _own.append((choice.load(), filters))


def _work(chunk: Chunk) -> Worked:
    tokenizer, filters = _own[0]
    return work(chunk, tokenizer, filters)
