"""Opens a tokenised pair with Megatron's own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantexp.data.binary import check_pair, pair_paths
from quantexp.data.index import check_index


def open_pair(prefix: Path) -> Any:
    """Open the pair as Megatron's IndexedDataset, which maps the files into memory.

    Keep a reference to it as long as any array read from it: once it is freed, Megatron unmaps the files, and reading
    such an array kills the process.

    Raises:
        DataError: a file is missing or not Megatron's, or `.bin` does not match `.idx`.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    check_pair(prefix)
    bin_path, idx_path = pair_paths(prefix)
    check_index(idx_path, bin_path)
    return IndexedDataset(str(prefix))
