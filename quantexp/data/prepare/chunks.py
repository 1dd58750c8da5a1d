"""Splits files into chunks of whole records, in order, without parsing the records.

A chunk is the unit of work of one worker. Its boundaries depend on the content alone, so the same input has the same
chunks in every run, also in one that starts in the middle.
"""

import importlib
import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantexp.data.prepare.inputs import HUB, Input, Kind
from quantexp.data.prepare.unpack import unpacked
from quantexp.errors import DataError

#: A chunk ends with the first record that reaches this many bytes.
CHUNK_BYTES = 1 << 20
#: The largest allowed record, so that memory stays bounded.
MAX_RECORD_BYTES = 64 << 20
#: Rows of a table per chunk.
_ROWS = 256
#: Columns used for records.
_COLUMNS = ("id", "text", "source", "title")


@dataclass(frozen=True)
class Position:
    """The beginning of a chunk in one input."""

    #: Bytes of the unpacked content, or rows.
    offset: int = 0
    #: The line or row there, from 1.
    line: int = 1


@dataclass(frozen=True)
class Chunk:
    """Whole records: XML pages, JSON lines, or rows as an Arrow stream."""

    kind: Kind
    data: bytes
    #: The first line or row.
    line: int
    #: The beginning of the next chunk.
    end: Position
    #: Bytes of the file, as stored, that have been read.
    num_read: int


def chunks(item: Input, start: Position) -> Iterator[Chunk]:
    """Yields the chunks of one input, from a position at which an earlier chunk ended.

    Raises:
        DataError: the file cannot be read, is truncated or damaged, changes its kind, or needs a missing library; a
            record is longer than 64 MiB.
    """
    match item.kind:
        case Kind.LINES:
            return _lines(item, start)
        case Kind.PAGES:
            return _pages(item, start)
        case Kind.ROWS:
            return _rows(item, start)
        case Kind.HUB:
            return _hub_rows(item, start)


def _lines(item: Input, start: Position) -> Iterator[Chunk]:
    position = start
    for data, num_read, ends in _pieces(item, start, b"\n"):
        # The last line may lack a line feed.
        line = position.line + data.count(b"\n") + (not ends)
        end = Position(position.offset + len(data), line)
        yield Chunk(Kind.LINES, data, position.line, end, num_read)
        position = end


def _pages(item: Input, start: Position) -> Iterator[Chunk]:
    position, rest = start, b""
    for data, num_read, ends in _pieces(item, start, b"</page>"):
        if not ends:
            rest = data
            break
        end = Position(position.offset + len(data), position.line + data.count(b"\n"))
        yield Chunk(Kind.PAGES, data, position.line, end, num_read)
        position = end
    if b"</mediawiki>" not in rest:
        last = position.line + rest.count(b"\n")
        raise DataError(
            f"{item.name}: cut short: the XML has no </mediawiki> after line "
            f"{last}; download or copy it again"
        )


def _pieces(item: Input, start: Position, mark: bytes) -> Iterator[tuple[bytes, int, bool]]:
    """Yields pieces that end in `mark`, and the remainder at the end of the file.

    With each piece comes the number of bytes read from the file, and whether the piece ends in the mark.
    """
    skip, buffer, num_read = start.offset, bytearray(), 0
    for block, num_read in unpacked(Path(item.name)):
        if skip >= len(block):
            skip -= len(block)
            continue
        buffer += block[skip:] if skip else block
        skip = 0
        while len(buffer) >= CHUNK_BYTES:
            end = buffer.find(mark, CHUNK_BYTES - len(mark))
            if end < 0:
                if len(buffer) > MAX_RECORD_BYTES:
                    raise DataError(
                        f"{item.name}: a record is longer than {MAX_RECORD_BYTES >> 20} MiB, "
                        f"{start.offset:,} bytes into the text or later: this is not {item.kind.value}"
                    )
                break
            end += len(mark)
            yield bytes(buffer[:end]), num_read, True
            del buffer[:end]
    if (last := buffer.rfind(mark)) >= 0:
        end = last + len(mark)
        yield bytes(buffer[:end]), num_read, True
        del buffer[:end]
    if buffer:
        yield bytes(buffer), num_read, False


def _rows(item: Input, start: Position) -> Iterator[Chunk]:
    arrow, parquet = _arrow(item), importlib.import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(item.name, buffer_size=CHUNK_BYTES) as file:
            names = [name for name in _COLUMNS if name in file.schema_arrow.names]
            if "text" not in names:
                raise DataError(
                    f"{item.name}: has no column `text`, only {', '.join(file.schema_arrow.names)}; "
                    "give another dataset.source"
                )
            row, total = 0, max(1, file.metadata.num_rows)
            for batch in file.iter_batches(_ROWS, columns=names):
                if row >= start.offset:
                    end = Position(row + batch.num_rows, row + batch.num_rows + 1)
                    num_read = item.num_bytes * end.offset // total
                    yield Chunk(Kind.ROWS, _stream(arrow, batch), row + 1, end, num_read)
                row += batch.num_rows
    except (arrow.ArrowException, OSError) as error:
        raise DataError(
            f"{item.name}: damaged or cut short ({str(error).splitlines()[0]}); download or copy it again"
        ) from error


def _stream(arrow: Any, batch: Any) -> bytes:
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def _arrow(item: Input) -> Any:
    try:
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise DataError(
            f"{item.name}: parquet needs the pyarrow library: pip install 'quantexp[data]'"
        ) from error


def _hub_rows(item: Input, start: Position) -> Iterator[Chunk]:
    """Streams a dataset of the Hub, `hf:NAME`, `hf:NAME:CONFIGURATION` or `hf:NAME:CONFIGURATION:SPLIT`."""
    try:
        library = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"dataset.source={item.name} needs the datasets library: pip install "
            "'quantexp[huggingface]'; or download the files and give their folder"
        ) from error
    name, configuration, split, *_ = [*item.name.removeprefix(HUB).split(":"), "", ""]
    try:
        rows = library.load_dataset(
            name, configuration or None, split=split or "train", streaming=True
        )
        yield from _row_chunks(iter(rows.skip(start.offset)), start)
    except (OSError, ValueError) as error:
        raise DataError(
            f"dataset.source={item.name}: the Hub does not give it ({str(error).splitlines()[0]}); "
            "check name and network, or download the files and give their folder"
        ) from error


def _row_chunks(rows: Iterator[dict[str, Any]], start: Position) -> Iterator[Chunk]:
    position = start
    lines: list[str] = []
    for row in rows:
        lines.append(json.dumps({key: row[key] for key in _COLUMNS if key in row}, default=str))
        if len(lines) == _ROWS:
            position = yield from _hub_chunk(lines, position)
            lines = []
    if lines:
        yield from _hub_chunk(lines, position)


def _hub_chunk(lines: list[str], position: Position) -> Generator[Chunk, None, Position]:
    end = Position(position.offset + len(lines), position.line + len(lines))
    yield Chunk(Kind.LINES, "\n".join(lines).encode(), position.line, end, 0)
    return end
