"""Training samples from .bin/.idx pairs, by Megatron's GPTDataset, and micro-batches of them.

A sample is `seq_length` consecutive tokens of the documents, which are shuffled and joined; its
labels are the tokens one further on. The order follows from the seed, the pair's content and its
part, and `seq_length` (see `order`): two runs that agree in these see the same samples, and a
longer one begins with those of a shorter one. Several pairs are blended by weight: Megatron's
BlendedDataset takes the next sample from whichever pair is furthest behind its share.
"""

# B micro-batch, T tokens of a sample

import copy
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from torch import Tensor

from quantexp.config.evaluation import num_samples
from quantexp.data.binary import fingerprint
from quantexp.data.prepared import check_split, read_whole
from quantexp.data.tokenizers.protocol import Tokenizer
from quantexp.errors import DataError
from quantexp.folders import cache_dir as cache_folder
from quantexp.model.checkpoints import first_iteration
from quantexp.runs.ranks import Rank
from quantexp.schema import Experiment
from quantexp.schema.dataset import DEFAULT_SPLIT
from quantexp.training.megatron.pairs import open_pair
from quantexp.training.megatron.sample_order import OrderedConfig, OrderedDataset, part_bounds

#: How many ids are looked at to find a dataset that belongs to another tokenizer.
_NUM_CHECKED_IDS = 1 << 20
#: The samples wanted for training, validation and test; 0 for a part that is not built.
_Sizes = tuple[int, int, int]
#: Where a part of the split begins and ends, from 0 to 1.
_Part = tuple[float, float] | None
_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")


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
    prefixes: Path | Mapping[Path, float],
    tokenizer: Tokenizer,
    *,
    seq_length: int,
    seed: int,
    num_samples_train: int,
    num_samples_valid: int = 0,
    cache_dir: Path,
    split: str = DEFAULT_SPLIT,
    mask_documents: bool = False,
    mask_eod_loss: bool = False,
) -> Datasets:
    """Returns the training samples, and the validation samples if any are asked for.

    Where torch.distributed is initialised every rank must call this, with the same arguments;
    rank 0 writes the index into `cache_dir` first. Runs and hosts may share `cache_dir` or not.
    The documents of a prepared pair are those that its card says; those of another pair go to
    training and validation by number in file order, as `split` says, whether validation samples
    are asked for or not.

    Args:
        prefixes: a pair, or several with their weights: so many of the samples come from each.
        tokenizer: the one that the ids are of.
        seq_length: T.
        seed: decides the order.
        num_samples_train: at least so many.
        num_samples_valid: at least so many; 0 is no validation.
        cache_dir: where indices are kept.
        split: the weights of training, validation and test.
        mask_documents: whether batches have an `attention_mask`, [1, T, T], True where a token
            must not attend: to later ones and to those of another document.
        mask_eod_loss: whether the loss mask is 0 where the token is an end of document.

    Raises:
        DataError: a pair is missing, damaged or of another tokenizer, `split` is no list of
            weights, is not that of a prepared pair, or leaves a wanted part without documents, or
            `cache_dir` cannot be written.
    """
    assert num_samples_train > 0
    weights = {prefixes: 1.0} if isinstance(prefixes, Path) else prefixes
    weights = {prefix.absolute(): weight for prefix, weight in weights.items()}
    sizes = (num_samples_train, num_samples_valid, 0)
    _check_split(split)
    parts = {str(p): _wanted_parts(p, tokenizer, split, sizes) for p in weights}
    blend = ([*parts], list(weights.values()) if len(weights) > 1 else None)
    config = OrderedConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=blend,
        split="1,1,1",
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=mask_documents,
        eod_mask_loss=mask_eod_loss,
        create_attention_mask=mask_documents,
        path_to_cache=str(cache_dir),
        fingerprints={str(prefix): fingerprint(prefix) for prefix in weights},
    )
    config.split_matrix = next(iter(parts.values()))
    train, valid, _ = _Builder(sizes, config, parts).build()
    return Datasets(train, valid)


class _Builder(BlendedMegatronDatasetBuilder):  # type: ignore[misc]
    """Megatron's builder, where each pair has parts of its own, and blends of them are not kept."""

    def __init__(self, sizes: _Sizes, config: OrderedConfig, parts: dict[str, list[_Part]]) -> None:
        self.parts = parts
        super().__init__(OrderedDataset, sizes, lambda: True, config)

    def _build_megatron_dataset_splits(
        self, dataset_path: str, split: Any, sizes: Any, synchronize_ranks: bool = True
    ) -> list[Any]:
        found: list[Any] = super()._build_megatron_dataset_splits(
            dataset_path, self.parts[dataset_path], sizes, synchronize_ranks
        )
        return found

    @staticmethod
    def build_generic_dataset(
        cls: Any,
        is_built_on_rank: Any,
        synchronize_ranks: bool,
        *args: Any,
    ) -> Any:
        """Builds one dataset; the order in which a blend takes its samples is quickly found again."""
        if cls is BlendedDataset:
            *rest, config = args
            config = copy.copy(config)
            config.path_to_cache = None
            args = (*rest, config)
        return BlendedMegatronDatasetBuilder.build_generic_dataset(
            cls, is_built_on_rank, synchronize_ranks, *args
        )


def batches(
    dataset: Samples,
    *,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    start_sample: int = 0,
) -> Iterator[dict[str, Tensor]]:
    """Yields this rank's micro-batches: tokens, labels, loss_mask, position_ids, shape BT.

    Where documents are masked there is an attention_mask too, shape [B, 1, T, T].

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
        yield {key: torch.stack([s[key] for s in samples]) for key in samples[0] if key in _KEYS}


@dataclass(frozen=True)
class RankBatches:
    """The micro-batches of one rank."""

    train: Iterator[dict[str, Tensor]]
    #: Of the held-out samples, anew at each call.
    held_out: Callable[[], Iterator[dict[str, Tensor]]]


def rank_batches(
    experiment: Experiment, rank: Rank, prefixes: Mapping[Path, float], tokenizer: Tokenizer
) -> RankBatches:
    """Returns what a rank of an experiment trains on and is evaluated on; every rank calls this.

    Raises:
        DataError: see `build_datasets`.
    """
    dataset, training = experiment.dataset, experiment.training
    datasets = build_datasets(
        prefixes,
        tokenizer,
        seq_length=training.seq_length,
        seed=training.seed,
        num_samples_train=training.iterations * training.global_batch_size,
        num_samples_valid=num_samples(experiment),
        cache_dir=cache_folder(experiment.paths.cache),
        split=str(dataset.split),
        mask_documents=dataset.mask_documents,
        mask_eod_loss=dataset.mask_eod_loss,
    )
    share: dict[str, int] = {
        "micro_batch_size": training.micro_batch_size,
        "data_parallel_rank": rank.rank,
        "data_parallel_size": rank.world_size,
    }
    start_sample = (first_iteration(experiment) - 1) * training.global_batch_size
    num_held_out = num_samples(experiment) // (training.micro_batch_size * rank.world_size)

    def held_out() -> Iterator[dict[str, Tensor]]:
        assert datasets.valid is not None, "asked for where anything is evaluated"
        return itertools.islice(batches(datasets.valid, **share), num_held_out)

    return RankBatches(batches(datasets.train, **share, start_sample=start_sample), held_out)


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


def _wanted_parts(prefix: Path, tokenizer: Tokenizer, split: str, sizes: _Sizes) -> list[_Part]:
    """Returns where each part of a pair lies, with None for those of which no sample is wanted.

    Megatron would never end where a part has no document.
    """
    card = read_whole(prefix, tokenizer)
    pair = open_pair(prefix)
    _check_ids(pair, prefix, tokenizer)
    if card is not None:
        check_split(prefix, card, split)
        parts = card.parts()
    else:
        parts = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    bounds = part_bounds(parts, len(pair.sequence_lengths))
    names = ("training", "validation", "test")
    for name, size, (begin, end) in zip(names, sizes, bounds, strict=True):
        if size and begin == end:
            raise DataError(
                f"{prefix} has {len(pair.sequence_lengths)} documents, of which dataset.split={split} "
                f"leaves none for {name}: give more documents or another split"
            )
    return [part if size else None for part, size in zip(parts, sizes, strict=True)]
