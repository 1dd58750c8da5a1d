"""Megatron's GPTDataset with an order that depends on the seed alone.

Megatron shuffles together as many epochs as a run asks for, so that a longer run begins with other
samples. Here each epoch is shuffled by itself, by the seed and its number: documents first, then
the samples that begin in it. A run that asks for more samples sees those of a shorter one, then
further ones. Samples still join documents, and the last document of an epoch the first of the next.

The index (which sample begins where) is kept in a folder that is named after all that decides it
and appears there whole, so that any number of ranks and runs may build it at once.
"""

# T tokens of a sample

import hashlib
import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from quantexp.data.binary import ORDER_VERSION, folder_beside

_FILES = ("documents", "samples", "shuffle")


@dataclass
class OrderedConfig(GPTDatasetConfig):  # type: ignore[misc]
    """Megatron's configuration, and the content of each pair by its prefix."""

    fingerprints: dict[str, str] = field(default_factory=dict)


class OrderedDataset(GPTDataset):  # type: ignore[misc]
    """Samples of one part of one pair."""

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns Megatron's three indices, from the cache if they are there."""
        length = self.config.sequence_length
        num_tokens = int(self.dataset.sequence_lengths[self.indices].sum(dtype=np.int64))
        num_epochs = (self.num_samples - 1) * length // num_tokens + 1
        decides = [
            ORDER_VERSION,
            self.config.fingerprints[self.dataset_path],
            [int(self.indices[0]), len(self.indices)],
            length,
            self.config.random_seed,
            self.index_split.name,
            num_epochs,
        ]
        name = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]
        folder = Path(self.config.path_to_cache) / f"index-{name}"
        if not folder.is_dir():
            _write(folder, self._indices(num_epochs, num_tokens))
        documents, samples, shuffle = (np.load(folder / f"{f}.npy", mmap_mode="r") for f in _FILES)
        return documents, samples, shuffle

    def _indices(self, num_epochs: int, num_tokens: int) -> list[np.ndarray]:
        """Returns the indices of the samples that begin in the first epochs of so many tokens each."""
        from megatron.core.datasets import helpers

        length = self.config.sequence_length
        first = [-(-epoch * num_tokens // length) for epoch in range(num_epochs + 1)]
        # The last samples end in a later epoch, and the label of the last token is one further on.
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
        """Returns the values in an order that the seed, their kind and the epoch decide."""
        key = f"{self.config.random_seed} {what} {self.index_split.name} {epoch}"
        words = np.frombuffer(hashlib.sha256(key.encode()).digest(), np.uint32)
        return np.random.RandomState(words).permutation(values)


def _write(folder: Path, indices: list[np.ndarray]) -> None:
    """Writes the folder beside, then renames it; another process's equal one may win."""
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
    """Returns the first document of each part and the one after its last; (0, 0) for none."""
    return [(round(part[0] * total), round(part[1] * total)) if part else (0, 0) for part in parts]
