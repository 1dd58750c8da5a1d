"""The work on one shard: parse its records, filter them, tokenise, and assign them to the parts.

Every step depends on the shard alone, never on earlier ones: hashes of a document's text and identity determine its
part of the split and whether it is in the sampled share of its source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quantexp.data.index import id_type
from quantexp.data.prepare.shards import Shard, records
from quantexp.data.sources import Document, LeftOut, Rejected
from quantexp.data.tokenizers.protocol import Tokenizer

#: The parts of a dataset, in their order within a pair.
PARTS = ("train", "validation", "test")
#: Bytes of a document's hash.
HASH_BYTES = 16
#: Number of sources that are counted by name; others are counted together.
MAX_SOURCES = 100
OTHER_SOURCES = "(others)"
#: Reasons for leaving out a document.
NOT_CHOSEN, NOT_SAMPLED = "source not chosen", "not in the sampled share"
SHORT, LONG = "shorter than min_chars", "longer than max_chars"


@dataclass(frozen=True)
class Filters:
    """Which documents to keep, and how to assign them to the parts."""

    #: The source of records that name none.
    name: str
    #: The bounds at which validation and test begin, from 0 to 1.
    bounds: tuple[float, float]
    #: Source -> share; empty keeps all documents.
    sources: dict[str, float] = field(default_factory=dict)
    min_chars: int = 1
    max_chars: int | None = None
    #: Whether to store each document's hash.
    hashes: bool = False


@dataclass
class Tally:
    """Counts of processed records; `add` combines two, in the order of the input."""

    #: Characters and bytes (UTF-8) of the kept text.
    num_chars: int = 0
    num_text_bytes: int = 0
    #: Reason -> records.
    left_out: dict[str, int] = field(default_factory=dict)
    num_rejected: int = 0
    #: Kept documents with the name of a special token, which is text.
    num_naming_specials: int = 0
    #: Source -> documents, tokens.
    sources: dict[str, list[int]] = field(default_factory=dict)

    @property
    def num_documents(self) -> int:
        """The kept documents."""
        return sum(row[0] for row in self.sources.values())

    @property
    def num_tokens(self) -> int:
        """Their tokens."""
        return sum(row[1] for row in self.sources.values())

    def add(self, other: Tally) -> None:
        """Add the counts of another tally."""
        self.num_chars += other.num_chars
        self.num_text_bytes += other.num_text_bytes
        for reason, number in other.left_out.items():
            self.leave_out(reason, number)
        self.num_rejected += other.num_rejected
        self.num_naming_specials += other.num_naming_specials
        for name, (num_documents, num_tokens) in other.sources.items():
            self.count(name, num_documents, num_tokens)

    def leave_out(self, reason: str, number: int = 1) -> None:
        """Count records that are left out."""
        self.left_out[reason] = self.left_out.get(reason, 0) + number

    def count(self, source: str, num_documents: int, num_tokens: int) -> None:
        """Count documents of a source."""
        known = source in self.sources or len(self.sources) < MAX_SOURCES
        row = self.sources.setdefault(source if known else OTHER_SOURCES, [0, 0])
        row[0] += num_documents
        row[1] += num_tokens


@dataclass(frozen=True)
class Piece:
    """Documents of one part, in the order of the input."""

    #: The documents' ids, concatenated, with `eod` after each.
    ids: np.ndarray
    #: The documents' lengths, int32.
    lengths: np.ndarray
    #: The documents' hashes, two uint64 each; empty if they are not stored.
    hashes: np.ndarray


def work(
    shard: Shard, tokenizer: Tokenizer, filters: Filters
) -> tuple[tuple[Piece, ...], Tally, list[Rejected]]:
    """Returns what a shard adds to each part, its counts, and its unreadable records."""
    tally, rejected = Tally(), []
    kept: list[tuple[Document, bytes]] = []
    seen = set[bytes]()
    for record in records(shard, filters.name):
        if isinstance(record, Rejected):
            rejected.append(record)
        elif isinstance(record, LeftOut):
            tally.leave_out(record.reason)
        elif (reason := left_out(record, filters, shard.label, seen)) is not None:
            tally.leave_out(reason)
        else:
            content = record.text.encode("utf-8")
            tally.num_chars += len(record.text)
            tally.num_text_bytes += len(content)
            tally.num_naming_specials += tokenizer.names_special(record.text)
            kept.append((record, hashlib.blake2b(content, digest_size=HASH_BYTES).digest()))
    tally.num_rejected = len(rejected)
    ids = tokenizer.tokenize_all([document.text for document, _ in kept])
    parts: tuple[list[int], ...] = ([], [], [])
    for index, (document, digest) in enumerate(kept):
        tally.count(document.source, 1, len(ids[index]) + 1)
        parts[part_of(digest, filters.bounds)].append(index)
    pieces = tuple(_piece(part, kept, ids, tokenizer, filters.hashes) for part in parts)
    return pieces, tally, rejected


def left_out(document: Document, filters: Filters, label: str, seen: set[bytes]) -> str | None:
    """Returns the reason why a document is not kept, or None.

    `seen` has the identities of earlier documents of the shard, and gets this one's.
    """
    if filters.sources:
        share = filters.sources.get(document.source)
        if share is None:
            return NOT_CHOSEN
        if share < 1 and _uniform(_identity(document, label, seen)) >= share:
            return NOT_SAMPLED
    if len(document.text) < filters.min_chars:
        return SHORT
    if filters.max_chars is not None and len(document.text) > filters.max_chars:
        return LONG
    return None


def _identity(document: Document, label: str, seen: set[bytes]) -> bytes:
    """Returns the hash of a document that decides whether the sample of its source contains it.

    It covers source, id and text, so that documents with the same id are independent unless they are copies. A document
    without an id, or with a copy before it in the shard, is identified by the label of its input and its position too.
    """
    words = [document.source, document.id, document.text]
    identity = _hash(*words)
    if not document.id or identity in seen:
        identity = _hash(*words, label, str(document.place))
    seen.add(identity)
    return identity


def _hash(*words: str) -> bytes:
    content = "\0".join(words).encode(errors="surrogatepass")
    return hashlib.blake2b(content, digest_size=8).digest()


def part_of(digest: bytes, bounds: tuple[float, float]) -> int:
    """Returns the part (0, 1, 2) of a document by its hash: copies are in the same part."""
    place = _uniform(digest)
    return (place >= bounds[0]) + (place >= bounds[1])


def _uniform(digest: bytes) -> float:
    """Returns a number in [0, 1) from the first 53 bits, so that it is exact."""
    return (int.from_bytes(digest[:8], "big") >> 11) / (1 << 53)


def _piece(
    part: list[int],
    kept: list[tuple[Document, bytes]],
    ids: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    hashes: bool,
) -> Piece:
    dtype = id_type(tokenizer.vocab_size)
    eod = np.array([tokenizer.eod], dtype)
    arrays = []
    for index in part:
        document_ids = ids[index]
        if isinstance(document_ids, bytes):
            arrays.append(np.frombuffer(document_ids, np.uint8).astype(dtype))
        else:
            arrays.append(np.array(document_ids, dtype))
        arrays.append(eod)
    digests = [kept[index][1] for index in part] if hashes else []
    return Piece(
        ids=np.concatenate(arrays) if arrays else np.zeros(0, dtype),
        lengths=np.array([len(ids[index]) + 1 for index in part], "<i4"),
        hashes=np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2),
    )
