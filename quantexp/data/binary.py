"""Megatron's tokenised form of a corpus: `PREFIX.bin` (ids) and `PREFIX.idx` (where documents lie).

The ids are uint16 for a vocabulary below 65,500 and int32 otherwise, which is Megatron's rule. A
pair is complete when its `.idx` is there: it is renamed into place last, and taken away first
where a pair is replaced.
"""

import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantexp.data.sources import Document
from quantexp.data.tokenizers.protocol import Tokenizer
from quantexp.errors import DataError

#: Raised whenever the same data and seed give another order of samples.
ORDER_VERSION = 1
_MIB = 1 << 20
#: A `.bin` below this size is hashed whole.
_WHOLE_BYTES = 64 * _MIB
#: Of a larger one this many pieces of one MiB, the first and the last among them.
_NUM_PIECES = 64


@dataclass(frozen=True)
class BinaryReport:
    """What was written."""

    num_documents: int
    #: The ids in `.bin`, one `eod` for each document included.
    num_tokens: int
    #: Both files together.
    num_bytes: int


def pair_paths(prefix: Path) -> tuple[Path, Path]:
    """Returns the paths of `.bin` and `.idx`; a dot within the prefix stays."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def write_binary(documents: Iterable[Document], prefix: Path, tokenizer: Tokenizer) -> BinaryReport:
    """Writes the pair at `prefix`, `eod` after each document, and says how much it was.

    An existing pair is replaced. If anything fails, the documents' iterator included, no file is
    left behind and an existing pair is as it was.

    Raises:
        DataError: there is no document, or the folder cannot be written.
    """
    bin_path, idx_path = pair_paths(prefix)
    with folder_beside(prefix) as folder:
        new_bin, new_idx = pair_paths(folder / "pair")
        num_documents, num_tokens = _build(documents, new_bin, new_idx, tokenizer)
        if num_documents == 0:
            raise DataError(f"no document to write to {bin_path}: the source holds no text")
        num_bytes = new_bin.stat().st_size + new_idx.stat().st_size
        idx_path.unlink(missing_ok=True)
        new_bin.replace(bin_path)
        new_idx.replace(idx_path)
    return BinaryReport(num_documents, num_tokens, num_bytes)


def check_pair(prefix: Path) -> None:
    """Makes sure that both files are there.

    Raises:
        DataError: one is missing; both paths are named.
    """
    bin_path, idx_path = pair_paths(prefix)
    if not (bin_path.is_file() and idx_path.is_file()):
        raise DataError(
            f"no tokenised dataset at {prefix}: expected {bin_path} and {idx_path}; "
            "write them with `quantexp prepare`, or give another dataset.path"
        )


def fingerprint(prefix: Path) -> str:
    """Returns the sha256, in hex, of a pair's content; its path and times do not count.

    Hashed are the whole `.idx`, the size of `.bin`, and all of `.bin` below 64 MiB. Of a larger
    `.bin` only 64 pieces of one MiB at equal spacing are read, from the very first to the very
    last: a change of single tokens between them goes unseen, a change of any document's length or
    of the order of lengths does not.

    Raises:
        DataError: a file is missing; both paths are named.
    """
    check_pair(prefix)
    bin_path, idx_path = pair_paths(prefix)
    size = bin_path.stat().st_size
    digest = hashlib.sha256(f"{idx_path.stat().st_size} {size}\n".encode())
    for path, offsets in ((idx_path, _all_offsets(idx_path)), (bin_path, _bin_offsets(bin_path))):
        with path.open("rb") as stream:
            for offset in offsets:
                stream.seek(offset)
                digest.update(stream.read(_MIB))
    return digest.hexdigest()


@contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """Yields a new folder, to be removed at the end, from which files can be renamed to `path`.

    Raises:
        DataError: the folder that `path` lies in cannot be made or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent)
    except OSError as error:
        raise DataError(
            f"cannot write {path}: {error.strerror}; give another folder, or mend its permissions"
        ) from error
    with folder as name:
        yield Path(name)


def _all_offsets(path: Path) -> Iterable[int]:
    return range(0, path.stat().st_size, _MIB)


def _bin_offsets(path: Path) -> Iterable[int]:
    """Returns where the pieces of one MiB begin."""
    size = path.stat().st_size
    if size < _WHOLE_BYTES:
        return _all_offsets(path)
    return [i * (size - _MIB) // (_NUM_PIECES - 1) for i in range(_NUM_PIECES)]


def _build(
    documents: Iterable[Document], bin_path: Path, idx_path: Path, tokenizer: Tokenizer
) -> tuple[int, int]:
    """Writes both files in place; returns how many documents and tokens."""
    import numpy as np

    from quantexp.data.index import id_type, write_index

    dtype = id_type(tokenizer.vocab_size)
    lengths_path = bin_path.with_suffix(".lengths")
    num_documents = num_tokens = 0
    with bin_path.open("wb") as ids_file, lengths_path.open("wb") as lengths_file:
        for document in documents:
            ids = np.array([*tokenizer.tokenize(document.text), tokenizer.eod], dtype)
            ids_file.write(ids.tobytes())
            lengths_file.write(np.array([len(ids)], "<i4").tobytes())
            num_documents += 1
            num_tokens += len(ids)
    write_index(idx_path, [lengths_path], dtype)
    return num_documents, num_tokens
