"""Training samples from a .bin/.idx pair, by Megatron's GPTDataset, and micro-batches of them.

A sample is `seq_length` consecutive tokens of the documents, which are shuffled and joined; its
labels are the tokens one further on. The order follows from the seed, the pair's content,
`seq_length`, `split` and the number of samples (which decides how many epochs are shuffled
together): two runs that agree in these see the same samples.

It materialises no attention mask (the model's is causal) and resets nothing at a document's end.
"""

# B micro-batch, T tokens of a sample

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from torch import Tensor
from torch import distributed as dist

from quantexp.data.binary import fingerprint, folder_beside, open_pair
from quantexp.data.tokenizer import Tokenizer
from quantexp.errors import DataError

#: The share of documents for training, validation and test.
DEFAULT_SPLIT = "95,5,0"
#: How many ids are looked at to find a dataset that belongs to another tokenizer.
_NUM_CHECKED_IDS = 1 << 20
#: The samples wanted for training, validation and test; None for a part that is not built.
_Sizes = tuple[int, int | None, None]
#: Where a part of the split begins and ends, from 0 to 1.
_Part = tuple[float, float] | None
_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


class Samples(Protocol):
    """What `batches` asks of a dataset; a GPTDataset is one."""

    def __len__(self) -> int:
        """Returns how many samples there are."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Returns tokens, labels, loss_mask and position_ids, each of shape T."""


@dataclass(frozen=True)
class Datasets:
    """The samples of one run."""

    #: At least as many as were asked for.
    train: Samples
    #: None where no validation sample was asked for.
    valid: Samples | None


def build_datasets(
    prefix: Path,
    tokenizer: Tokenizer,
    *,
    seq_length: int,
    seed: int,
    num_samples_train: int,
    num_samples_valid: int = 0,
    cache_dir: Path,
    split: str = DEFAULT_SPLIT,
) -> Datasets:
    """Returns the training samples, and the validation samples if any are asked for.

    Where torch.distributed is initialised every rank must call this, with the same arguments;
    rank 0 writes the index into `cache_dir`, which all ranks must see. Runs may share
    `cache_dir`: an index has its own folder, named after all that decides it, and appears there
    complete. Documents go to training and validation by number in file order, as `split` says,
    whether validation samples are asked for or not.

    Raises:
        DataError: the pair is missing, damaged or of another tokenizer, `split` is no list of
            weights or leaves a wanted part without documents, or `cache_dir` cannot be written or
            is not shared.
    """
    assert num_samples_train > 0
    prefix = prefix.absolute()
    sizes = (num_samples_train, num_samples_valid or None, None)
    _check_split(split)
    pair = open_pair(prefix)
    _check_ids(pair, prefix, tokenizer)
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=([str(prefix)], None),
        split=split,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    config.split_matrix = _wanted_parts(config, sizes, pair, prefix)
    identity = [str(prefix), fingerprint(prefix), tokenizer.fingerprint(), seq_length, seed, split]
    index_dir = cache_dir / f"index-{_hash([*identity, *sizes])}"
    _write_index_once(config, sizes, index_dir)
    config.path_to_cache = str(index_dir)
    train, valid, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    return Datasets(train, valid)


def batches(
    dataset: Samples,
    *,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    start_sample: int = 0,
) -> Iterator[dict[str, Tensor]]:
    """Yields this rank's micro-batches: tokens, labels, loss_mask, position_ids, shape BT.

    Samples are dealt in the dataset's order, `micro_batch_size` to each rank in turn, from
    `start_sample` (the samples that all ranks together have consumed). So N consecutive
    micro-batches of every rank hold the same samples for any `data_parallel_size` that divides
    the work, whoever takes which. It ends when the samples left do not give every rank a full
    micro-batch: all ranks end together.
    """
    assert 0 <= data_parallel_rank < data_parallel_size
    stride = micro_batch_size * data_parallel_size
    own = data_parallel_rank * micro_batch_size
    for start in range(start_sample, len(dataset) - stride + 1, stride):
        samples = [dataset[start + own + i] for i in range(micro_batch_size)]
        yield {key: torch.stack([sample[key] for sample in samples]) for key in _KEYS}


def _check_ids(pair: Any, prefix: Path, tokenizer: Tokenizer) -> None:
    """Makes sure that the ids fit the tokenizer.

    The first ones stand for all: to read a whole corpus takes hours.
    """
    num_ids = min(_NUM_CHECKED_IDS, int(pair.sequence_lengths.sum()))
    largest = int(pair.bin_reader.read(pair.index.dtype, num_ids, 0).max())
    if largest >= tokenizer.vocab_size:
        raise DataError(
            f"{prefix}.bin has id {largest}, but the tokenizer has {tokenizer.vocab_size} ids: "
            "set dataset.tokenizer to the one the dataset was prepared with"
        )


def _check_split(split: str) -> None:
    number = r"\d+(\.\d+)?"
    if not re.fullmatch(rf"{number}(,{number}){{0,2}}", split) or not re.search("[1-9]", split):
        raise DataError(
            "dataset.split must be the weights of training, validation and test, such as "
            f"{DEFAULT_SPLIT}, got {split}"
        )


def _wanted_parts(config: GPTDatasetConfig, sizes: _Sizes, pair: Any, prefix: Path) -> list[_Part]:
    """Returns the split's parts with None for those of which no sample is wanted.

    Megatron would build one epoch of every part, and never end where a part has no document.
    """
    num_documents = len(pair.sequence_lengths)
    wanted = [part if size else None for part, size in zip(config.split_matrix, sizes, strict=True)]
    for name, size, part in zip(("training", "validation", "test"), sizes, wanted, strict=True):
        begin, end = (round(share * num_documents) for share in part or (0, 0))
        if size and begin == end:
            raise DataError(
                f"{prefix} has {num_documents} documents, of which dataset.split={config.split} "
                f"leaves none for {name}: give more documents or another split"
            )
    return wanted


def _hash(identity: list[Any]) -> str:
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def _write_index_once(config: GPTDatasetConfig, sizes: _Sizes, index_dir: Path) -> None:
    """Makes rank 0 write the index, unless it is there, and all others wait for it."""
    distributed = dist.is_available() and dist.is_initialized()
    if (not distributed or dist.get_rank() == 0) and not index_dir.is_dir():
        _write_index(config, sizes, index_dir)
    if distributed:
        dist.barrier()
    if not index_dir.is_dir():
        raise DataError(
            f"{index_dir} was written by rank 0 but this process cannot see it: "
            "give a cache folder that all hosts share"
        )


def _write_index(config: GPTDatasetConfig, sizes: _Sizes, index_dir: Path) -> None:
    """Writes Megatron's index to a folder beside, then renames it; another run's equal one may win.

    Megatron itself writes file by file into the place where another run looks for them.
    """
    with folder_beside(index_dir) as folder:
        config.path_to_cache = str(folder / "index")
        builder = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config)
        # build() has barriers, which only rank 0 would reach here.
        builder._build_megatron_dataset_splits(
            config.blend[0][0], config.split_matrix, sizes, synchronize_ranks=False
        )
        try:
            (folder / "index").rename(index_dir)
        except OSError:
            if not index_dir.is_dir():
                raise
