"""A run's identity: a hash over everything that decides its numbers, and nothing else.

In it: model, data content, scheme, training, data-parallel size, attention path, device class, version of the
numerics, and that 16-bit products go through fp32 where this machine's CPU has no kernel for them. Not in it: capture,
drawing, the rest of the launcher, folders, names. Two runs of one identity give the same numbers; a completed one need
not run again. The versions of packages are provenance, not identity.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from enum import Enum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from quantexp.config.start_point import recorded_data, start_point
from quantexp.data.binary import ORDER_VERSION, fingerprint, pair_paths
from quantexp.data.completed import paths, tokenizer_of
from quantexp.data.prepared import check_split, read_whole
from quantexp.data.sample import sample_fingerprint
from quantexp.data.tokenizers.protocol import Tokenizer
from quantexp.errors import DataError
from quantexp.formats.types import Rounding
from quantexp.model.huggingface.fit import fitting_weights
from quantexp.model.huggingface.weights import open_weights
from quantexp.quant.precision import changes, entry_record, precision_map
from quantexp.runs.device import multiplies_natively
from quantexp.schema import DatasetConfig, Experiment, LauncherKind, ModelConfig

#: Raised whenever the values that a format or product gives change.
NUMERICS_VERSION = 1


def identity(experiment: Experiment, device_class: str) -> dict[str, Any]:
    """What is hashed, readable.

    Raises:
        DataError: a dataset, tokenizer or weights that are missing, or weights of another model.
    """
    training = dataclasses.asdict(experiment.training)
    model = _model(experiment.model)
    attention_path = experiment.training.attention.value
    training.pop("attention")
    if experiment.training.decay_iterations is None:
        training.pop("decay_iterations")
    if not _shares_draws(experiment):
        training.pop("weight_cache")
    data = data_identity(experiment.dataset, experiment.model.vocab_size)
    for part, label in (
        (training, "name"),
        (training, "start_from"),
        (training, "start_optimizer"),
        (model, "name"),
    ):
        part.pop(label)
    return {
        "model": model,
        "data": data,
        "scheme": _scheme(experiment),
        "training": {
            **{k: v.value if isinstance(v, Enum) else v for k, v in training.items()},
            **_start(experiment, data),
        },
        "attention_path": attention_path,
        "device_class": device_class,
        **_products(experiment, device_class),
        "data_parallel": experiment.launcher.num_processes,
        "numerics": NUMERICS_VERSION,
    }


def _model(model: ModelConfig) -> dict[str, Any]:
    """The model's numbers; attention and experts of another kind, and published weights, only where it has them.

    Published weights are in it by their content.

    Raises:
        DataError: weights that are missing, damaged or another model's.
    """
    numbers = dataclasses.asdict(model)
    numbers.pop("from_hf")
    if numbers.pop("init_from") is not None:
        numbers["initial_weights"] = weights_fingerprint(model)
    for part in ("mla", "moe"):
        if numbers[part] is None:
            numbers.pop(part)
    if model.moe is not None:
        numbers["moe"]["aux_loss"] = model.moe.aux_loss.value
    return numbers


def hash8(content: dict[str, Any]) -> str:
    """The first 8 hex digits of the content's sha256."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def folder_name(experiment: Experiment, content: dict[str, Any]) -> str:
    """`<model>_<dataset>_<scheme>-<hash8>`."""
    quant = experiment.quant.name
    return f"{experiment.model.name}_{experiment.dataset.name}_{quant}-{hash8(content)}"


def data_identity(dataset: DatasetConfig, vocab_size: int) -> dict[str, Any]:
    """Fingerprints of the tokens and the tokenizer, not their paths, and how samples are made of them.

    Raises:
        DataError: no data at all, files that are missing, a tokenizer that is not the data's or has more ids than the
            model has.
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
        raise DataError(
            f"dataset={dataset.name} has no data: give dataset.path=PREFIX of a Megatron .bin/.idx pair (`quantexp "
            "prepare` makes one of raw text) and dataset.tokenizer_path=FOLDER, or training=fast for the built-in "
            "sample"
        )
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


#: A file, when it was last written, its size and inode: another one whenever the content may be another.
_Stamp = tuple[str, int, int, int]


def _stamps(path: Path) -> tuple[_Stamp, ...]:
    """The stamps of a file, or of the files in a folder; none where there is nothing."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(str(file), file.stat()) for file in files if file.is_file()]
    return tuple((name, s.st_mtime_ns, s.st_size, s.st_ino) for name, s in stats)


# The points of a sweep share their data, and a tokenizer takes a second to read: each content is looked at once.


@cache
def _sample_tokens(name: str) -> str:
    return sample_fingerprint(name)


@lru_cache(maxsize=16)
def _tokens(prefix: Path, stamps: tuple[_Stamp, ...]) -> str:
    return fingerprint(prefix)


@dataclass(frozen=True)
class _TokenizerKey:
    """A tokenizer, known by its configuration and its files."""

    stamps: tuple[_Stamp, ...]
    dataset: DatasetConfig = dataclasses.field(compare=False)
    named: tuple[str | None, ...] = ()

    @classmethod
    def of(cls, dataset: DatasetConfig) -> _TokenizerKey:
        path = dataset.tokenizer_path
        assert dataset.tokenizer is not None
        named = (dataset.tokenizer.value, path, dataset.eod, dataset.tokenizer_pattern)
        return cls(_stamps(Path(path).expanduser()) if path else (), dataset, named)


@lru_cache(maxsize=16)
def _tokenizer(key: _TokenizerKey) -> Tokenizer:
    return tokenizer_of(key.dataset)


@lru_cache(maxsize=16)
def _weights(path: Path, stamps: tuple[_Stamp, ...]) -> str:
    return open_weights(path).fingerprint()


def _start(experiment: Experiment, data: dict[str, str]) -> dict[str, Any]:
    """What a run goes on from, by its content; nothing where it begins by itself.

    Raises:
        DataError: a checkpoint that is missing, of another model, or of a run with other data.
    """
    point, given = start_point(experiment), f"training.start_from={experiment.training.start_from}"
    if point is None:
        return {}
    if recorded_data(point) != data:
        raise DataError(
            f"{given} has its place in other data than dataset={experiment.dataset.label}"
        )
    content = {
        "iteration": point.iteration,
        "weights": weights_fingerprint(experiment.model, point.weights, given),
    }
    if point.padding.is_file():
        content["padding"] = open_weights(point.padding).fingerprint()
    if experiment.training.start_optimizer:
        content["optimizer"] = point.state_fingerprint()
    return {"start": content}


def weights_fingerprint(
    model: ModelConfig, path: Path | None = None, given: str | None = None
) -> str:
    """The fingerprint of published weights, which fit the model; the arguments are those of `fitting_weights`.

    Raises:
        DataError: weights that are missing, damaged or another model's.
    """
    weights = fitting_weights(model, path, given)
    stamps = tuple(stamp for file in weights.files for stamp in _stamps(file))
    return _weights(weights.path, stamps)


def _products(experiment: Experiment, device_class: str) -> dict[str, str]:
    """That 16-bit products go through fp32; nothing where torch's own kernels multiply, or a job's CPU is not known."""
    if device_class != "cpu" or experiment.launcher.kind is LauncherKind.slurm:
        return {}
    native = multiplies_natively(experiment.training.precision)
    return {} if native else {"products": "fp32"}


def _shares_draws(experiment: Experiment) -> bool:
    """Whether the micro-batches of a step multiply one stochastic rounding of a weight, where each had its own.

    That alone changes a number: a kept copy of anything else is the same bits made again. Without, and for a step of
    one micro-batch over all processes, which is the first, a run has the identity it had before there were kept copies.
    """
    training = experiment.training
    return (
        training.weight_cache
        and training.global_batch_size > training.micro_batch_size
        and any(
            entry.operand.once_per_step and entry.operand.rounding is Rounding.STOCHASTIC
            for iteration in changes(experiment.quant)
            if iteration <= training.iterations
            for declared in precision_map(experiment.model, experiment.quant, iteration).values()
            for entry in declared.entries()
        )
    )


def _scheme(experiment: Experiment) -> list[Any]:
    """The precision map at every iteration where it changes."""
    return [
        [iteration, [entry_record(e) for module in declared.values() for e in module.entries()]]
        for iteration in changes(experiment.quant)
        if iteration <= experiment.training.iterations
        for declared in (precision_map(experiment.model, experiment.quant, iteration),)
    ]
