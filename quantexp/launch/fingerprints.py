"""Fingerprints of the data and the weights of a run: of their content, never of their paths."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from quantexp.data.binary import ORDER_VERSION, check_pair, fingerprint, pair_paths, unfinished
from quantexp.data.prepared import check_split, default_prefix, paths, read_whole, tokenizer_of
from quantexp.data.sample import sample_fingerprint
from quantexp.data.tokenizers.protocol import Tokenizer
from quantexp.errors import DataError
from quantexp.folders import user_path
from quantexp.model.huggingface.fit import fitting_weights
from quantexp.model.huggingface.weights import open_weights
from quantexp.schema import DatasetConfig, ModelConfig


def data_identity(dataset: DatasetConfig, vocab_size: int) -> dict[str, Any]:
    """Fingerprints of tokens and tokenizer, not their paths, and the options that turn tokens into samples.

    Raises:
        DataError: there is no data, files are missing, or the tokenizer is not the data's or has more ids than the
            model.
    """
    samples = {
        "split": dataset.split,
        "order": ORDER_VERSION,
        "mask_documents": dataset.mask_documents,
        "mask_eod_loss": dataset.mask_eod_loss,
    }
    if dataset.sample:
        return {"tokens": _sample_tokens(dataset.name), **samples}
    weights = paths(dataset)
    if not weights:
        default = default_prefix(dataset.name)
        make = f"`quantexp prepare dataset={dataset.name} dataset.source=FILES` writes {default}, which runs find"
        raise DataError(
            f"dataset={dataset.name} has no data: give dataset.path=PREFIX of a Megatron .bin/.idx pair and its "
            f"dataset.tokenizer_path=FOLDER, or raw text ({unfinished(Path(default)) or make}), or training=fast for "
            "the built-in sample"
        )
    for prefix in weights:
        check_pair(prefix)
    tokenizer = _tokenizer(_TokenizerKey.of(dataset))
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer.vocab_size} ids and model.vocab_size is {vocab_size}; give the "
            "model's tokenizer, or a larger model.vocab_size"
        )
    pairs = [_pair(prefix, tokenizer, dataset) for prefix in weights]
    total = sum(weights.values())
    blend = [[pair, w / total] for pair, w in zip(pairs, weights.values(), strict=True)]
    return {
        "tokens": pairs[0] if len(pairs) == 1 else blend,
        "tokenizer": tokenizer.fingerprint(),
        **samples,
    }


def _pair(prefix: Path, tokenizer: Tokenizer, dataset: DatasetConfig) -> str:
    """The fingerprint of one pair's tokens."""
    if (card := read_whole(prefix, tokenizer)) is not None:
        check_split(prefix, card, str(dataset.split))
    stamps = tuple(stamp for file in pair_paths(prefix) for stamp in _stamps(file))
    return _tokens(prefix, stamps)


#: Path, modification time, size and inode of a file: differs whenever the content may differ.
_Stamp = tuple[str, int, int, int]


def _stamps(path: Path) -> tuple[_Stamp, ...]:
    """The stamps of a file, or of the files in a folder; empty if the path does not exist."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(str(file), file.stat()) for file in files if file.is_file()]
    return tuple((name, s.st_mtime_ns, s.st_size, s.st_ino) for name, s in stats)


# The points of a sweep share their data, and a tokenizer takes a second to load: each content is fingerprinted once.


@cache
def _sample_tokens(name: str) -> str:
    return sample_fingerprint(name)


@lru_cache(maxsize=16)
def _tokens(prefix: Path, stamps: tuple[_Stamp, ...]) -> str:
    return fingerprint(prefix)


@dataclass(frozen=True)
class _TokenizerKey:
    """The cache key of a tokenizer: its configuration and the stamps of its files."""

    stamps: tuple[_Stamp, ...]
    dataset: DatasetConfig = dataclasses.field(compare=False)
    named: tuple[str | None, ...] = ()

    @classmethod
    def of(cls, dataset: DatasetConfig) -> _TokenizerKey:
        path = dataset.tokenizer_path
        assert dataset.tokenizer is not None
        named = (dataset.tokenizer.value, path, dataset.eod, dataset.tokenizer_pattern)
        return cls(_stamps(user_path(path)) if path else (), dataset, named)


@lru_cache(maxsize=16)
def _tokenizer(key: _TokenizerKey) -> Tokenizer:
    return tokenizer_of(key.dataset)


@lru_cache(maxsize=16)
def _weights(path: Path, stamps: tuple[_Stamp, ...]) -> str:
    return open_weights(path).fingerprint()


def weights_fingerprint(
    model: ModelConfig, path: Path | None = None, option: str | None = None
) -> str:
    """The fingerprint of published weights that fit the model; the arguments are those of `fitting_weights`.

    Raises:
        DataError: the weights are missing, damaged or another model's.
    """
    weights = fitting_weights(model, path, option)
    stamps = tuple(stamp for file in weights.files for stamp in _stamps(file))
    return _weights(weights.path, stamps)
