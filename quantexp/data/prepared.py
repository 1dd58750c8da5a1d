"""The card of a prepared dataset: `PREFIX.json`, beside `PREFIX.bin` and `PREFIX.idx`.

It records the source of the pair, the tokenizer (with a copy in `PREFIX.tokenizer/`), how many documents, in order, are
for training, validation and test, and the report. The card is written last: a pair prepared here is complete when its
card exists. A pair without a card is Megatron's own and is used unchanged. The card completes a dataset's
configuration: tokenizer, split and label. Imports neither numpy nor torch.

The card records the XXH3 hash of each file. Before training reads a pair, its files are hashed, as fast as the disk is
(XXH3 itself takes some 10 GB/s), and compared. The cache records the hash of a file with its size, times and inode: a
file is hashed once after every change, by one process of a host while the others wait. XXH3 detects damage; it does not
protect against forgery.
"""

import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from quantexp.data.binary import pair_paths
from quantexp.data.tokenizers.load import load_tokenizer
from quantexp.data.tokenizers.protocol import Tokenizer, id_bytes
from quantexp.errors import DataError, UnreadableError
from quantexp.folders import user_path, written_beside
from quantexp.reading.json_files import read_json
from quantexp.schema.dataset import DEFAULT_SPLIT, DatasetConfig, TokenizerKind

#: Incremented whenever older cards become unreadable.
CARD_VERSION = 1


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer of the ids."""

    kind: str
    vocab_size: int
    eod: int
    #: The sha256 of everything that determines its ids.
    fingerprint: str
    #: The name of its file in `PREFIX.tokenizer/`; None for bytes.
    file: str | None
    #: Configured in addition to the file.
    eod_name: str | None = None
    pattern: str | None = None


@dataclass(frozen=True)
class Card:
    """The description of a prepared dataset."""

    version: int
    dataset: str
    #: The hash of the preparation's input and configuration.
    job: str
    tokenizer: TokenizerRecord
    #: As configured: the shares of training, validation and test.
    split: str
    #: Of training, validation and test.
    num_documents: tuple[int, int, int]
    num_tokens: tuple[int, int, int]
    #: Of `.bin` and of `.idx`.
    num_bytes: tuple[int, int]
    #: The counts of the preparation.
    report: dict[str, Any]
    #: The XXH3 hashes of `.bin` and of `.idx`.
    hashes: tuple[str, str]

    def parts(self) -> list[tuple[float, float] | None]:
        """The ranges of training, validation and test in the pair, from 0 to 1; None for an empty part."""
        total, begin, ranges = sum(self.num_documents), 0, list[tuple[float, float] | None]()
        for number in self.num_documents:
            ranges.append((begin / total, (begin + number) / total) if number else None)
            begin += number
        return ranges


def default_prefix(dataset_name: str) -> str:
    """Returns where `prepare` writes a dataset, and a run finds it, unless `dataset.path` is given."""
    return f"data/{dataset_name}"


def card_path(prefix: Path) -> Path:
    """Returns the path of a prefix's card."""
    return Path(f"{prefix}.json")


def tokenizer_folder(prefix: Path) -> Path:
    """Returns the folder with the copy of the tokenizer."""
    return Path(f"{prefix}.tokenizer")


def read_card(prefix: Path) -> Card | None:
    """Returns the card, or None for a pair that was not prepared here.

    Raises:
        DataError: the card cannot be read, or is of another version.
    """
    path = card_path(prefix)
    try:
        content = read_json(path, dict[str, Any])
    except FileNotFoundError:
        return None
    except UnreadableError as error:
        raise DataError(f"{error}; prepare the dataset again") from error
    try:
        return _card(content)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: no card of this version of quantexp ({error}); prepare the dataset again"
        ) from error


def _card(content: dict[str, Any]) -> Card:
    """Returns the card of a JSON document.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    if content["version"] != CARD_VERSION:
        raise ValueError(f"version {content['version']}")
    for key, number in (("num_documents", 3), ("num_tokens", 3), ("num_bytes", 2)):
        content[key] = _sizes(key, content[key], number)
    bin_hash, idx_hash = content["hashes"]
    content["hashes"] = (str(bin_hash), str(idx_hash))
    tokenizer = TokenizerRecord(**content["tokenizer"])
    if tokenizer.file is not None and tokenizer.file != Path(tokenizer.file).name:
        raise ValueError(f"tokenizer.file must be the name of a file, got {tokenizer.file}")
    kind = TokenizerKind(tokenizer.kind).value
    names = (tokenizer.fingerprint, tokenizer.eod_name or "", tokenizer.pattern or "")
    texts = (content["dataset"], content["job"], content["split"], kind, *names)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a text is of another type")
    _sizes("tokenizer", [tokenizer.vocab_size, tokenizer.eod], 2)
    num_documents, num_tokens = sum(content["num_documents"]), sum(content["num_tokens"])
    if not num_documents or content["num_bytes"] != (
        num_tokens * id_bytes(tokenizer.vocab_size),
        42 + 20 * num_documents,
    ):
        raise ValueError("its numbers of documents, tokens and bytes contradict each other")
    return Card(**{**content, "tokenizer": tokenizer})


def _sizes(key: str, numbers: Any, number: int) -> tuple[int, ...]:
    sizes = tuple(numbers)
    if len(sizes) != number or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{key} must be {number} sizes, got {sizes!s:.80}")
    return sizes


def read_whole(prefix: Path, tokenizer: Tokenizer) -> Card | None:
    """Returns the card of a complete pair with this tokenizer; None for a pair without a card.

    Raises:
        DataError: the pair or the tokenizer differs from the card.
    """
    card = read_card(prefix)
    if card is None:
        return None
    for path, size in zip(pair_paths(prefix), card.num_bytes, strict=True):
        num_bytes = path.stat().st_size if path.is_file() else 0
        if num_bytes != size:
            raise DataError(
                f"{path} has {num_bytes:,} bytes where {card_path(prefix)} says {size:,}: copy or prepare "
                "the dataset again"
            )
    if tokenizer.fingerprint() != card.tokenizer.fingerprint:
        raise DataError(
            f"{prefix} was prepared with another tokenizer ({card.tokenizer.kind}, "
            f"{card.tokenizer.vocab_size:,} ids, {card.tokenizer.fingerprint[:12]}) than the one given "
            f"({tokenizer.vocab_size:,} ids, {tokenizer.fingerprint()[:12]}): drop dataset.tokenizer "
            "and dataset.tokenizer_path to use its own, or prepare the dataset again"
        )
    return card


def check_split(prefix: Path, card: Card, split: str) -> None:
    """Requires that a prepared pair was split as the run is configured.

    Raises:
        DataError: the splits differ.
    """
    if split != card.split:
        raise DataError(
            f"{prefix} was prepared with dataset.split={card.split}, got {split}; drop dataset.split, or "
            "prepare the dataset again"
        )


def hash_of(path: Path) -> str:
    """Returns the XXH3 hash of a file, 128 bits in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


def check_intact(prefix: Path, card: Card, cache_dir: Path) -> None:
    """Requires that the files of a pair have the hashes on its card.

    Raises:
        DataError: a file differs or cannot be read.
    """
    for path, prepared in zip(pair_paths(prefix), card.hashes, strict=True):
        try:
            if _known_hash(path, cache_dir / "hashes") == prepared:
                continue
            actual = hash_of(path)  # the cache itself may be damaged
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        if actual != prepared:
            raise DataError(
                f"{path} has changed since it was prepared: its hash is {actual}, where {card_path(prefix)} "
                f"says {prepared}; copy the dataset again, or prepare it again with force=true"
            )


def _known_hash(path: Path, folder: Path) -> str:
    """Returns the hash of a file from the cache, or computes it; without a usable cache it is computed."""
    stat = path.stat()
    stamp = f"{path.absolute()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
    record = folder / hashlib.sha256(stamp.encode("utf-8", "surrogateescape")).hexdigest()[:32]
    with _locked(record.with_suffix(".lock")):
        with suppress(OSError):
            return record.read_bytes().decode("ascii", "replace")
        actual = hash_of(path)
        with suppress(OSError), written_beside(record) as part:
            part.write_text(actual)
        return actual


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits for other processes of this host, where the folder allows locks."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        stream = path.open("a")
    except OSError:
        yield
        return
    with stream:
        with suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def complete(dataset: DatasetConfig) -> None:
    """Sets path, tokenizer, split and label of a dataset that is not the built-in sample.

    One without a path or a blend has the path of what `prepare` wrote, if there is anything.
    Tokenizer and split come from the card beside the first path, else they are the defaults.

    Raises:
        DataError: the card cannot be read.
    """
    default = Path(default_prefix(dataset.name))
    written = (card_path(default), *pair_paths(default))
    if not (dataset.path or dataset.blend) and any(p.exists() for p in written):
        dataset.path = str(default)
    prefix = next(iter(paths(dataset)), None)
    card = read_card(prefix) if prefix is not None else None
    if card is not None and dataset.tokenizer is None and dataset.tokenizer_path is None:
        assert prefix is not None
        dataset.tokenizer = TokenizerKind(card.tokenizer.kind)
        if card.tokenizer.file is not None:
            dataset.tokenizer_path = str(tokenizer_folder(prefix) / card.tokenizer.file)
        dataset.eod = dataset.eod or card.tokenizer.eod_name
        dataset.tokenizer_pattern = dataset.tokenizer_pattern or card.tokenizer.pattern
    dataset.tokenizer = dataset.tokenizer or TokenizerKind.huggingface
    if dataset.split is None:
        dataset.split = DEFAULT_SPLIT if card is None else card.split
    dataset.label = dataset.name


def paths(dataset: DatasetConfig) -> dict[Path, float]:
    """Returns the prefixes of a dataset with their weights; empty for the sample."""
    if dataset.path is not None:
        return {user_path(dataset.path): 1.0}
    return {user_path(path): weight for path, weight in (dataset.blend or {}).items()}


def tokenizer_of(dataset: DatasetConfig) -> Tokenizer:
    """Returns the tokenizer of a completed configuration.

    Raises:
        DataError: it cannot be read.
    """
    assert dataset.tokenizer is not None
    return load_tokenizer(
        dataset.tokenizer.value,
        dataset.tokenizer_path,
        eod=dataset.eod,
        pattern=dataset.tokenizer_pattern,
    )
