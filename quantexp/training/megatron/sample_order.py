"""Opens a tokenised pair with Megatron's reader, and samples it in an order that does not depend on the iterations.

Megatron's GPTDataset shuffles all epochs of a run together, so a longer run begins with other samples. Here each epoch
is shuffled separately, by the seed and its number: first the documents, then the samples that begin in it. A longer run
begins with the samples of a shorter one. Samples still span documents, also across epochs.

The index (the start of each sample) is stored in a folder named after the hash of everything that determines it. The
folder appears complete, by renaming, so any number of ranks and runs may build it at the same time.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from quantexp.data.binary import ORDER_VERSION, check_pair, folder_beside, pair_paths
from quantexp.data.index import check_index

_FILES = ("documents", "samples", "shuffle")


@dataclass
class OrderedConfig(GPTDatasetConfig):  # type: ignore[misc]
    """Megatron's configuration, and the content of each pair by its prefix."""

    fingerprints: dict[str, str] = field(default_factory=dict)
    #: Whether samples say which document each token belongs to.
    names_documents: bool = False


class OrderedDataset(GPTDataset):  # type: ignore[misc]
    """Samples of one part of one pair."""

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """Megatron's sample; with `names_documents` also `documents`, [T]: the document of each token."""
        sample: dict[str, torch.Tensor] = super().__getitem__(idx)
        if self.config.names_documents:
            sample["documents"] = torch.from_numpy(self._documents(0 if idx is None else idx))
        return sample

    def _documents(self, idx: int) -> np.ndarray:
        """The document of each token of a sample: its index in the pair."""
        place = self.shuffle_index[idx]
        (first, offset), (last, _) = self.sample_index[place], self.sample_index[place + 1]
        documents = self.document_index[first : last + 1].astype(np.int64)
        lengths = self.dataset.sequence_lengths[documents].astype(np.int64)
        lengths[0] -= offset
        return np.repeat(documents, lengths)[: self.config.sequence_length]

    @property
    def samples_in_all(self) -> int:
        """The number of whole samples in one epoch."""
        num_tokens = int(self.dataset.sequence_lengths[self.indices].sum(dtype=np.int64))
        return (num_tokens - 1) // int(self.config.sequence_length)

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Megatron's three indices, from the cache if present."""
        length = self.config.sequence_length
        num_tokens = int(self.dataset.sequence_lengths[self.indices].sum(dtype=np.int64))
        num_epochs = (self.num_samples - 1) * length // num_tokens + 1
        determinants = [
            ORDER_VERSION,
            self.config.fingerprints[self.dataset_path],
            [int(self.indices[0]), len(self.indices)],
            length,
            self.config.random_seed,
            self.index_split.name,
            num_epochs,
        ]
        name = hashlib.sha256(json.dumps(determinants).encode()).hexdigest()[:16]
        folder = Path(self.config.path_to_cache) / f"index-{name}"
        if not folder.is_dir():
            _write(folder, self._indices(num_epochs, num_tokens))
        documents, samples, shuffle = (np.load(folder / f"{f}.npy", mmap_mode="r") for f in _FILES)
        return documents, samples, shuffle

    def _indices(self, num_epochs: int, num_tokens: int) -> list[np.ndarray]:
        """The indices of the samples that begin in the first `num_epochs` epochs of `num_tokens` each."""
        from megatron.core.datasets import helpers

        length = self.config.sequence_length
        first = [-(-epoch * num_tokens // length) for epoch in range(num_epochs + 1)]
        # The last sample ends in a later epoch, and its last label is one token further.
        num_read = -(-(first[-1] * length + 1) // num_tokens)
        documents = [self._shuffled(self.indices, "documents", epoch) for epoch in range(num_read)]
        joined = np.concatenate(documents).astype(np.int32)
        samples = helpers.build_sample_idx(
            self.dataset.sequence_lengths.copy(), joined, length, num_read, num_tokens, True, 1
        )
        shuffle = [
            self._shuffled(np.arange(begin, end), "samples", epoch)
            for epoch, (begin, end) in enumerate(pairwise(first))
        ]
        return [joined, samples[: first[-1] + 1], np.concatenate(shuffle).astype(np.int64)]

    def _shuffled(self, values: np.ndarray, what: str, epoch: int) -> np.ndarray:
        """The values in an order determined by the seed, their kind and the epoch."""
        key = f"{self.config.random_seed} {what} {self.index_split.name} {epoch}"
        words = np.frombuffer(hashlib.sha256(key.encode()).digest(), np.uint32)
        return np.random.RandomState(words).permutation(values)


def _write(folder: Path, indices: list[np.ndarray]) -> None:
    """Write the folder under a temporary name and rename it, unless another process was faster."""
    with folder_beside(folder) as beside:
        own = beside / "index"
        own.mkdir()
        for name, index in zip(_FILES, indices, strict=True):
            np.save(own / f"{name}.npy", index)
        try:
            own.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise


def part_bounds(parts: list[tuple[float, float] | None], total: int) -> list[tuple[int, int]]:
    """The first document of each part and the one after its last; (0, 0) for no part."""
    return [(round(part[0] * total), round(part[1] * total)) if part else (0, 0) for part in parts]


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
