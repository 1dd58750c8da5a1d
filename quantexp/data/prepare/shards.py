"""Cuts the input into shards of whole records, in order, and parses their records.

A shard is a range of one input: of the bytes of its content, unpacked, or of the rows of a table. It is the unit of
work of one process and has one output. Its boundaries depend on the content alone, so the same input has the same
shards in every run, and a large file has many.
"""

import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from quantexp.data.prepare.inputs import HUB, Input, Kind
from quantexp.data.prepare.unpack import unpacked
from quantexp.data.sources import Record, Rejected, read_lines, read_pages, row_record
from quantexp.data.wiki_names import ENGLISH, Wiki, wiki_of
from quantexp.errors import DataError

#: A shard ends with the first record that reaches this many bytes.
SHARD_BYTES = 4 << 20
#: Rows of a table per shard.
SHARD_ROWS = 1024
#: Rows of a table read at a time: a row of a few bytes in the file may be a text of any size. The process that reads a
#: table then gives some 100 MB/s to all workers, a twentieth of what it could with 1,024 rows.
_ROWS_AT_A_TIME = 8
#: The largest allowed record, so that memory stays bounded.
MAX_RECORD_BYTES = 64 << 20
#: Columns used for records.
_COLUMNS = ("id", "text", "source", "title")


@dataclass(frozen=True)
class Shard:
    """Whole records: XML pages, JSON lines, or rows as an Arrow stream."""

    #: The name of the input.
    file: str
    kind: Kind
    data: bytes
    #: Its range, in bytes of the unpacked content or in rows.
    start: int
    end: int
    #: The first line or row, from 1.
    line: int
    #: Bytes of the file, as stored, that have been read.
    num_read: int
    #: The input's label.
    label: str
    #: Of pages: what the head of the file says of their wiki.
    wiki: Wiki = ENGLISH


def read_shards(item: Input) -> Iterator[Shard]:
    """Yields the shards of one input.

    Raises:
        DataError: the file cannot be read, is truncated or damaged, changes its kind, or needs a missing library; a
            record is longer than 64 MiB.
    """
    match item.kind:
        case Kind.LINES:
            return _lines(item)
        case Kind.PAGES:
            return _pages(item)
        case Kind.ROWS:
            return _rows(item)
        case Kind.HUB:
            return _hub_rows(item)


def records(shard: Shard, name: str) -> Iterator[Record]:
    """Yields the records of a shard; `name` is the source of records that name none."""
    if shard.kind is Kind.PAGES:
        return read_pages(shard.data, shard.line, shard.wiki)
    if shard.kind is Kind.LINES:
        return read_lines(shard.data, shard.line, name)
    return _row_records(shard, name)


def _row_records(shard: Shard, name: str) -> Iterator[Record]:
    ipc = importlib.import_module("pyarrow.ipc")
    with ipc.open_stream(shard.data) as stream:
        number = shard.line
        for batch in stream:
            try:
                for row in batch.to_pylist():
                    yield row_record(row, number, name)
                    number += 1
            except UnicodeDecodeError:
                yield from _row_by_row(batch, number, name)
                number += batch.num_rows


def _row_by_row(batch: Any, first: int, name: str) -> Iterator[Record]:
    """Yields the records of a batch in which a text is no UTF-8."""
    for index in range(batch.num_rows):
        try:
            row = batch.slice(index, 1).to_pylist()[0]
        except UnicodeDecodeError:
            yield Rejected(first + index, "no UTF-8")
        else:
            yield row_record(row, first + index, name)


def _lines(item: Input) -> Iterator[Shard]:
    start, line = 0, 1
    for data, num_read, _ in _pieces(item, b"\n"):
        yield Shard(
            item.name, Kind.LINES, data, start, start + len(data), line, num_read, item.label
        )
        start, line = start + len(data), line + data.count(b"\n")


def _pages(item: Input) -> Iterator[Shard]:
    start, line, rest, wiki = 0, 1, b"", ENGLISH
    for data, num_read, ends in _pieces(item, b"</page>"):
        if not ends:
            rest = data
            break
        if start == 0:
            wiki = _wiki(item, data[: data.find(b"<page>")])
        yield Shard(
            item.name, Kind.PAGES, data, start, start + len(data), line, num_read, item.label, wiki
        )
        start, line = start + len(data), line + data.count(b"\n")
    if b"</mediawiki>" not in rest:
        last = line + rest.count(b"\n")
        raise DataError(
            f"{item.name}: cut short: the XML has no </mediawiki> after line "
            f"{last}; download or copy it again"
        )


def _wiki(item: Input, head: bytes) -> Wiki:
    try:
        return wiki_of(head)
    except ValueError as error:
        raise DataError(f"{item.name}: {error}; download or copy it again") from error


def _pieces(item: Input, mark: bytes) -> Iterator[tuple[bytes, int, bool]]:
    """Yields pieces that end in `mark`, and the remainder at the end of the file.

    With each piece comes the number of bytes read from the file, and whether the piece ends in the mark.
    """
    buffer, num_read, start = bytearray(), 0, 0
    searched = SHARD_BYTES - len(mark)
    for block, num_read in unpacked(Path(item.name)):
        buffer += block
        while len(buffer) >= SHARD_BYTES:
            end = buffer.find(mark, searched)
            if end < 0:
                searched = len(buffer) - len(mark) + 1
                if len(buffer) > MAX_RECORD_BYTES:
                    raise DataError(
                        f"{item.name}: a record is longer than {MAX_RECORD_BYTES >> 20} MiB, "
                        f"{start:,} bytes into the text or later: this is not {item.kind.value}"
                    )
                break
            end += len(mark)
            yield bytes(buffer[:end]), num_read, True
            del buffer[:end]
            start += end
            searched = SHARD_BYTES - len(mark)
    if (last := buffer.rfind(mark)) >= 0:
        end = last + len(mark)
        yield bytes(buffer[:end]), num_read, True
        del buffer[:end]
    if buffer:
        yield bytes(buffer), num_read, False


def _rows(item: Input) -> Iterator[Shard]:
    arrow, parquet = _arrow(item), importlib.import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(
            item.name, buffer_size=1 << 20, page_checksum_verification=True
        ) as file:
            names = [name for name in _COLUMNS if name in file.schema_arrow.names]
            if "text" not in names:
                raise DataError(
                    f"{item.name}: has no column `text`, only {', '.join(file.schema_arrow.names)}; "
                    "give another dataset.source"
                )
            start, total = 0, max(1, file.metadata.num_rows)
            plain = map(_plain, file.iter_batches(_ROWS_AT_A_TIME, columns=names))
            for batches in _grouped(item, plain):
                end = start + sum(batch.num_rows for batch in batches)
                num_read = min(item.num_bytes, item.num_bytes * end // total)
                data = _stream(arrow, batches)
                yield Shard(item.name, Kind.ROWS, data, start, end, start + 1, num_read, item.label)
                start = end
            if start != file.metadata.num_rows:
                raise DataError(
                    f"{item.name}: damaged: it has {start:,} rows where its end says "
                    f"{file.metadata.num_rows:,}; download or copy it again"
                )
    except (arrow.ArrowException, OSError) as error:
        raise DataError(
            f"{item.name}: damaged or cut short ({str(error).splitlines()[0]}); download or copy it again"
        ) from error


def _plain(batch: Any) -> Any:
    """Returns a batch with each text in full, so that its size counts."""
    columns = [
        column.dictionary_decode() if hasattr(column, "dictionary_decode") else column
        for column in batch.columns
    ]
    return type(batch).from_arrays(columns, names=batch.schema.names)


def _grouped(item: Input, batches: Iterator[Any]) -> Iterator[list[Any]]:
    """Yields batches of rows that together make a shard."""
    group, end, num_rows, num_bytes = list[Any](), 0, 0, 0
    for batch in batches:
        end += batch.num_rows
        if batch.nbytes > _ROWS_AT_A_TIME * MAX_RECORD_BYTES:
            raise DataError(
                f"{item.name}: a record is longer than {MAX_RECORD_BYTES >> 20} MiB, at most "
                f"{_ROWS_AT_A_TIME} rows before row {end + 1:,}; give another dataset.source"
            )
        group.append(batch)
        num_rows, num_bytes = num_rows + batch.num_rows, num_bytes + batch.nbytes
        if num_rows >= SHARD_ROWS or num_bytes > MAX_RECORD_BYTES:
            yield group
            group, num_rows, num_bytes = [], 0, 0
    if group:
        yield group


def _stream(arrow: Any, batches: list[Any]) -> bytes:
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def _arrow(item: Input) -> Any:
    try:
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise DataError(
            f"{item.name}: parquet needs the pyarrow library: pip install 'quantexp[data]'"
        ) from error


def _hub_rows(item: Input) -> Iterator[Shard]:
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
        rows = iter(
            library.load_dataset(
                name, configuration or None, split=split or "train", streaming=True
            )
        )
        start = 0
        while lines := [_json_line(row) for row in islice(rows, SHARD_ROWS)]:
            data, end = "\n".join(lines).encode(), start + len(lines)
            yield Shard(item.name, Kind.LINES, data, start, end, start + 1, 0, item.label)
            start = end
    except (OSError, ValueError) as error:
        raise DataError(
            f"dataset.source={item.name}: the Hub does not give it ({str(error).splitlines()[0]}); "
            "check name and network, or download the files and give their folder"
        ) from error


def _json_line(row: dict[str, Any]) -> str:
    return json.dumps({key: row[key] for key in _COLUMNS if key in row}, default=str)
