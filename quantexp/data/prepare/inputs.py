"""Finds the input files, their order, and the kind of their content."""

import glob
import hashlib
import os
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from quantexp.data.prepare.unpack import first_bytes
from quantexp.data.sources import BLANKS
from quantexp.errors import DataError
from quantexp.folders import require_text, user_path
from quantexp.terminal.close_matches import did_you_mean, near

#: Prefix of a Hugging Face dataset's name.
HUB = "hf:"
#: Suffixes of files beside data that are not data.
_NOT_DATA = (".md5", ".sha1", ".sha256", ".idx", ".bin", ".md", ".py", ".yaml", ".html")
#: Number of first bytes that must reveal the kind of a file.
_HEAD = 1 << 16
#: First bytes of a parquet file.
_PARQUET = b"PAR1"
#: First bytes of UTF-16: its marks, or the first two characters of JSON or XML.
_UTF_16 = (
    *(b"\xff\xfe", b"\xfe\xff"),
    *(text.encode(order) for text in ('{"', "<m", "<?") for order in ("utf-16-le", "utf-16-be")),
)
#: First bytes of content that is not read -> what to do.
_OTHERS = {
    _PARQUET: "parquet is read unpacked: unpack it first",
    **dict.fromkeys(_UTF_16, "it is UTF-16: convert it to UTF-8 first"),
}


class Kind(Enum):
    """The content of a file, which determines how it is split into records."""

    PAGES = "MediaWiki XML"
    LINES = "JSON lines"
    ROWS = "parquet"
    HUB = "Hugging Face dataset"


@dataclass(frozen=True)
class Input:
    """One file, or one dataset of the Hub."""

    name: str
    kind: Kind
    #: As stored, compressed or not; 0 if unknown.
    num_bytes: int = 0
    #: Its path below the folder that holds all sources, which stays when that folder moves; for `hf:NAME` the name.
    label: str = ""


def find_inputs(source: object) -> list[Input]:
    """Returns the files that `dataset.source` names, each once; those of a folder or pattern are sorted.

    A folder includes all files below it except hidden ones, files that are not data (checksums, notes), and Wikipedia's
    multistream index. The kind of a file is determined by its content, not by its name.

    Raises:
        DataError: no source, no matching file, a file of none of the kinds, or a path that is not UTF-8.
    """
    words = [source] if isinstance(source, str) else source
    if not isinstance(words, list) or not words or not all(isinstance(w, str) for w in words):
        raise DataError(
            "dataset.source must be the raw text to prepare: a file, a folder, a pattern, hf:NAME, "
            f"or a list of them, got {source!r}"
        )
    inputs: dict[str, Input] = {}
    for word in words:
        for item in _hub(word) if word.startswith(HUB) else _files(word):
            inputs.setdefault(item.name, item)
    folders = [_folder(word) for word in words if not word.startswith(HUB)]
    root = os.path.commonpath(folders) if folders else ""
    return [
        item if item.kind is Kind.HUB else replace(item, label=os.path.relpath(item.name, root))
        for item in inputs.values()
    ]


def inputs_hash(inputs: list[Input]) -> str:
    """Returns a hash that represents the input's content: names, sizes, and modification times.

    Raises:
        DataError: an input has been removed.
    """
    digest = hashlib.sha256()
    for item in inputs:
        written = _modified(item) if item.kind is not Kind.HUB else 0
        digest.update(f"{item.name}\0{item.num_bytes}\0{written}\n".encode())
    return digest.hexdigest()


def _modified(item: Input) -> int:
    try:
        return Path(item.name).stat().st_mtime_ns
    except OSError as error:
        raise DataError(f"{item.name}: cannot be read: {error.strerror}") from error


def _hub(word: str) -> list[Input]:
    return [Input(word, Kind.HUB, label=word)]


def _folder(word: str) -> Path:
    """Returns the folder that a source names, or the lowest one above what it names."""
    path = user_path(word).absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _files(word: str) -> list[Input]:
    path = user_path(word)
    if path.is_dir():
        files = [p for p in sorted(path.rglob("*")) if p.is_file() and _is_data(p, path)]
    elif path.is_file():
        files = [path]
    else:
        files = sorted(Path(p) for p in glob.glob(str(path), recursive=True))  # noqa: PTH207  (absolute patterns too)
        files = [p for p in files if p.is_file()]
    if not files:
        names = [] if path.exists() else [p.name for p in path.parent.glob("*")]
        close = did_you_mean(str(path.with_name(name)) for name in near(path.name, names))
        raise DataError(
            f"dataset.source={word}: no such file, and no file in a folder or by a pattern of that "
            f"name; {close or 'give the raw text'}"
        )
    for file in files:
        require_text("dataset.source", file, DataError)
    return [Input(str(p.absolute()), _kind(p), p.stat().st_size) for p in files]


def _is_data(path: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    index = "multistream-index" in path.name
    return not (hidden or index or path.suffix.lower() in _NOT_DATA)


def _kind(path: Path) -> Kind:
    stripped = first_bytes(path, _HEAD).lstrip(BLANKS)
    if _is_parquet(path):
        return Kind.ROWS
    if stripped.startswith(b"<") and b"<mediawiki" in stripped:
        return Kind.PAGES
    remedy = next((words for head, words in _OTHERS.items() if stripped.startswith(head)), None)
    if remedy is None and (stripped.startswith(b"{") or not stripped):
        return Kind.LINES
    raise DataError(
        f"{path}: neither a MediaWiki XML export, JSON lines nor parquet (it begins with "
        f"{stripped[:20]!r}); {remedy or 'give another dataset.source'}"
    )


def _is_parquet(path: Path) -> bool:
    """Returns whether the file, as its library reads it, is parquet."""
    with path.open("rb") as file:
        return file.read(len(_PARQUET)) == _PARQUET
