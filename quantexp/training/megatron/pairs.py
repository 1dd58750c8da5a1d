"""Opens a tokenised pair with Megatron's own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantexp.data.binary import check_pair, pair_paths
from quantexp.data.index import INDEX_HEAD, INDEX_MAGIC
from quantexp.errors import DataError


def open_pair(prefix: Path) -> Any:
    """Open the pair as Megatron's IndexedDataset, which maps the files into memory.

    Keep a reference to it as long as any array read from it: once it is freed, Megatron unmaps the files, and reading
    such an array kills the process.

    Raises:
        DataError: a file is missing or not Megatron's, or the size of `.bin` does not match `.idx`.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    check_pair(prefix)
    bin_path, idx_path = pair_paths(prefix)
    _check_index(idx_path)
    if bin_path.stat().st_size == 0:
        raise DataError(f"{bin_path} is empty: copy or prepare the dataset again")
    dataset = IndexedDataset(str(prefix))
    expected = int(dataset.sequence_lengths.sum()) * dataset.index.dtype_size
    if expected != bin_path.stat().st_size:
        raise DataError(
            f"{bin_path} has {bin_path.stat().st_size} bytes where {idx_path} says {expected}: "
            "copy or prepare the dataset again"
        )
    return dataset


def _check_index(idx_path: Path) -> None:
    """Check that the index is Megatron's and complete.

    Megatron's reader checks less, and the object that it leaves half built raises again when garbage-collected.
    """
    with idx_path.open("rb") as stream:
        head = stream.read(INDEX_HEAD.size)
    if len(head) < INDEX_HEAD.size or not head.startswith(INDEX_MAGIC):
        raise DataError(f"{idx_path}: not a Megatron index; set another dataset.path")
    _, _, num_sequences, num_documents = INDEX_HEAD.unpack(head)
    if idx_path.stat().st_size < INDEX_HEAD.size + 12 * num_sequences + 8 * num_documents:
        raise DataError(f"{idx_path}: cut short: copy or prepare the dataset again")
