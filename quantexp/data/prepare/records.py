"""The records of a chunk, for any kind of file."""

import importlib
from collections.abc import Iterator

from quantexp.data.prepare.chunks import Chunk
from quantexp.data.prepare.inputs import Kind
from quantexp.data.sources import Record, read_lines, read_pages, row_record


def records(chunk: Chunk, name: str) -> Iterator[Record]:
    """Yields the records of a chunk; `name` is the source of records that name none."""
    if chunk.kind is Kind.PAGES:
        return read_pages(chunk.data, chunk.line)
    if chunk.kind is Kind.LINES:
        return read_lines(chunk.data, chunk.line, name)
    return _rows(chunk, name)


def _rows(chunk: Chunk, name: str) -> Iterator[Record]:
    ipc = importlib.import_module("pyarrow.ipc")
    with ipc.open_stream(chunk.data) as stream:
        number = chunk.line
        for batch in stream:
            for row in batch.to_pylist():
                yield row_record(row, number, name)
                number += 1
