"""Builds training samples from .bin/.idx pairs with Megatron's GPTDataset, and micro-batches of them.

A sample is `seq_length` consecutive tokens of the shuffled and joined documents; its labels are the tokens shifted by
one. The order depends on the seed, the pair's content, its part of the split and `seq_length` (see `sample_order`):
runs with the same values see the same samples, and a longer run begins with those of a shorter one. Several pairs are
blended by weight: Megatron's BlendedDataset takes the next sample from the pair furthest behind its share.
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
from quantexp.config.start_point import StartPoint, first_iteration
from quantexp.data.binary import fingerprint
from quantexp.data.prepared import check_intact, check_split, paths, read_whole, tokenizer_of
from quantexp.data.sample import sample_prefix
from quantexp.data.tokenizers.protocol import Tokenizer
from quantexp.errors import DataError
from quantexp.folders import cache_dir as cache_folder
from quantexp.model.layout import Layout
from quantexp.runs.ranks import Rank
from quantexp.schema import Experiment
from quantexp.schema.dataset import DEFAULT_SPLIT
from quantexp.training.log import LOG
from quantexp.training.megatron.sample_order import (
    OrderedConfig,
    OrderedDataset,
    open_pair,
    part_bounds,
)

#: Token ids that are read to detect a dataset of another tokenizer.
_NUM_CHECKED_IDS = 1 << 20
#: The number of training, validation and test samples; 0 for a part that is not built.
_Sizes = tuple[int, int, int]
#: Start and end of a part of the split, from 0 to 1.
_Part = tuple[float, float] | None
_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask", "documents")


class Samples(Protocol):
    """The interface of a dataset for `batches`; GPTDataset implements it."""

    def __len__(self) -> int:
        """The number of samples."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Tokens, labels, loss_mask and position_ids, each of shape [T]."""


NO_SAMPLES: Samples = tuple[dict[str, Tensor], ...]()


@dataclass(frozen=True)
class Datasets:
    """The samples of one run."""

    #: At least `num_samples_train`; empty if that is 0.
    train: Samples
    #: At least `num_samples_valid`; None if that is 0.
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
    names_documents: bool = False,
) -> Datasets:
    """Build the training samples and, if `num_samples_valid` is not 0, the validation samples.

    If torch.distributed is initialised, every rank must call this with the same arguments; rank 0 writes the index to
    `cache_dir` first. Runs and hosts may share `cache_dir`. The card of a prepared pair assigns its documents to
    training and validation. Other pairs are divided in file order by `split`, even without validation samples.

    Args:
        prefixes: a pair, or several with the weights of their shares of the samples.
        tokenizer: the tokenizer that produced the ids.
        seq_length: T.
        seed: determines the order.
        num_samples_train: minimum number of training samples; 0 for none.
        num_samples_valid: minimum number of validation samples; 0 for none.
        cache_dir: folder of the indices.
        split: the weights of training, validation and test.
        mask_documents: whether samples have an `attention_mask`, [1, T, T], True where a token must not attend: to
            later tokens and to other documents.
        mask_eod_loss: whether the loss mask is 0 at end-of-document tokens.
        names_documents: whether samples have `documents`, [T], the document of each token.

    Raises:
        DataError: a pair is missing, damaged or of another tokenizer; `split` is not a list of weights, differs from a
            prepared pair's split or leaves a required part without documents; `cache_dir` cannot be written.
    """
    assert num_samples_train + num_samples_valid > 0
    weights = {prefixes: 1.0} if isinstance(prefixes, Path) else prefixes
    weights = {prefix.absolute(): weight for prefix, weight in weights.items()}
    sizes = (num_samples_train, num_samples_valid, 0)
    _check_split(split)
    parts = {str(p): _parts(p, tokenizer, split, sizes, cache_dir) for p in weights}
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
        names_documents=names_documents,
    )
    config.split_matrix = next(iter(parts.values()))
    train, valid, _ = _Builder(sizes, config, parts).build()
    return Datasets(NO_SAMPLES if train is None else train, valid)


class _Builder(BlendedMegatronDatasetBuilder):  # type: ignore[misc]
    """Megatron's builder with separate parts for each pair and no cached index of blends."""

    def __init__(self, sizes: _Sizes, config: OrderedConfig, parts: dict[str, list[_Part]]) -> None:
        self.parts = parts
        super().__init__(OrderedDataset, sizes, lambda: True, config)

    def _build_megatron_dataset_splits(
        self, dataset_path: str, split: Any, sizes: Any, synchronize_ranks: bool = True
    ) -> list[Any]:
        datasets: list[Any] = super()._build_megatron_dataset_splits(
            dataset_path, self.parts[dataset_path], sizes, synchronize_ranks
        )
        return datasets

    @staticmethod
    def build_generic_dataset(
        cls: Any,
        is_built_on_rank: Any,
        synchronize_ranks: bool,
        *args: Any,
    ) -> Any:
        """Build one dataset. A blend's order is not cached, since recomputing it is fast."""
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
    """Yield this rank's micro-batches: tokens, labels, loss_mask and position_ids, each [B, T].

    If documents are masked, there is also an attention_mask, [B, 1, T, T].

    The ranks take `micro_batch_size` samples each in turn, in the dataset's order, from `start_sample` (the number of
    samples that all ranks together have consumed). A global batch therefore has the same samples for any
    `data_parallel_size` that divides it. The iterator ends on all ranks together, when the remaining samples are too
    few for a full micro-batch on each.
    """
    assert 0 <= data_parallel_rank < data_parallel_size
    stride = micro_batch_size * data_parallel_size
    own = data_parallel_rank * micro_batch_size
    for start in range(start_sample, len(dataset) - stride + 1, stride):
        samples = [_unique(dataset[start + own + i]) for i in range(micro_batch_size)]
        yield {key: torch.stack([s[key] for s in samples]) for key in samples[0] if key in _KEYS}


def _unique(sample: dict[str, Tensor]) -> dict[str, Tensor]:
    """A sample of a blend, whose documents are numbered in each pair, with documents that differ between pairs."""
    if "documents" in sample and "dataset_id" in sample:
        pair = int(sample["dataset_id"])
        return sample | {"documents": sample["documents"] + (pair << 32)}
    return sample


def data_of(experiment: Experiment) -> tuple[dict[Path, float], Tokenizer]:
    """The pairs of a run with the weights of their shares, and the tokenizer.

    Raises:
        DataError: they are missing.
    """
    dataset = experiment.dataset
    if dataset.sample:
        cache = cache_folder(experiment.paths.cache)
        return {sample_prefix(dataset.name, cache, str(dataset.split)): 1.0}, tokenizer_of(dataset)
    return paths(dataset), tokenizer_of(dataset)


@dataclass(frozen=True)
class RankBatches:
    """The micro-batches of one rank, none to train on without training, and the samples that they are made of."""

    train: Iterator[dict[str, Tensor]]
    #: Returns a new iterator over the held-out micro-batches.
    held_out: Callable[[], Iterator[dict[str, Tensor]]]
    text_of: Callable[[int], str]
    samples: tuple[Samples, Samples | None]


def rank_batches(
    experiment: Experiment,
    rank: Rank,
    prefixes: Mapping[Path, float],
    tokenizer: Tokenizer,
    start: StartPoint | None = None,
) -> RankBatches:
    """The training and held-out micro-batches of a rank; every rank calls this.

    With a checkpoint `start`, the training ones are those after its iteration.

    Raises:
        DataError: see `build_datasets`.
    """
    dataset, training = experiment.dataset, experiment.training
    layout, is_evaluated_only = Layout.of(experiment), experiment.evaluate.only
    num_trained = training.iterations * training.global_batch_size
    datasets = build_datasets(
        prefixes,
        tokenizer,
        seq_length=training.seq_length,
        seed=training.seed,
        num_samples_train=0 if is_evaluated_only else num_trained,
        num_samples_valid=num_samples(experiment),
        cache_dir=cache_folder(experiment.paths.cache),
        split=str(dataset.split),
        mask_documents=dataset.mask_documents,
        mask_eod_loss=dataset.mask_eod_loss,
        names_documents=is_evaluated_only,
    )
    if repeated := _repeated(datasets.valid, num_samples(experiment)):
        if is_evaluated_only:  # intervals would be too narrow
            raise DataError(repeated)
        if rank.leads:
            LOG.warning(f"some held-out samples count more than once: {repeated}")
    share: dict[str, int] = {
        "micro_batch_size": training.micro_batch_size,
        "data_parallel_rank": layout.place(rank.rank).data,
        "data_parallel_size": layout.data,
    }
    start_sample = (first_iteration(experiment, start) - 1) * training.global_batch_size
    num_held_out = num_samples(experiment) // (training.micro_batch_size * layout.data)

    def held_out() -> Iterator[dict[str, Tensor]]:
        assert datasets.valid is not None, "built if the run evaluates"
        return itertools.islice(batches(datasets.valid, **share), num_held_out)

    train = batches(datasets.train, **share, start_sample=start_sample)
    return RankBatches(train, held_out, tokenizer.text_of, (datasets.train, datasets.valid))


def _repeated(held_out: Samples | None, number: int) -> str:
    """What to say of held-out samples that are evaluated more than once: the most there are; empty if none is."""
    part = repeated_part(held_out)
    if part is None:
        return ""
    most = part.samples_in_all
    return (
        f"evaluation.samples={number} needs {part.num_samples} held-out samples of {part.dataset_path}, which "
        f"has {most}: take evaluation.samples={most}, a shorter training.seq_length, or more of dataset.split"
    )


def repeated_part(held_out: Samples | None) -> OrderedDataset | None:
    """The first pair whose held-out samples come more than once, because there are too few; None if none's do."""
    for part in [] if held_out is None else getattr(held_out, "datasets", [held_out]):
        if min(len(part), part.num_samples) > part.samples_in_all:
            return part  # type: ignore[no-any-return]
    return None


def _check_ids(pair: Any, prefix: Path, tokenizer: Tokenizer) -> None:
    """Check that the first ids are valid for the tokenizer; reading a whole corpus would take hours."""
    num_ids = min(_NUM_CHECKED_IDS, int(pair.sequence_lengths.sum()))
    ids = pair.bin_reader.read(pair.index.dtype, num_ids, 0)
    if not 0 <= (extreme := min(int(ids.min()), 0) or int(ids.max())) < tokenizer.vocab_size:
        raise DataError(
            f"{prefix}.bin has id {extreme}, but the tokenizer has {tokenizer.vocab_size} ids: "
            "set dataset.tokenizer to the tokenizer of the dataset"
        )


def _check_split(split: str) -> None:
    number = r"\d+(\.\d+)?"
    if not re.fullmatch(rf"{number}(,{number}){{0,2}}", split) or not re.search("[1-9]", split):
        raise DataError(
            "dataset.split must be the weights of training, validation and test, such as "
            f"{DEFAULT_SPLIT}, got {split}"
        )


def _parts(
    prefix: Path, tokenizer: Tokenizer, split: str, sizes: _Sizes, cache_dir: Path
) -> list[_Part]:
    """The bounds of each part of a pair, None for a part without samples.

    A part without documents is an error, since Megatron would loop forever.
    """
    card = read_whole(prefix, tokenizer)
    if card is not None:
        check_intact(prefix, card, cache_dir)
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
