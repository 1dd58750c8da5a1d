"""A run's identity: a hash over everything that determines its numbers, and nothing else.

It covers model, data content, scheme, training, data-parallel size, the layout where it changes numbers, attention
path, device class, the version of the numerics, and whether 16-bit products go through fp32 because this machine's CPU
has no kernel for them. It excludes capture, drawing, the other launcher options, folders and names. Two runs of one
identity produce the same numbers, so a completed run need not run again. Package versions belong to provenance, not to
identity.
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
from quantexp.folders import user_path
from quantexp.formats.types import Rounding
from quantexp.model.checkpoints import require_published
from quantexp.model.huggingface.file_names import CONFIG
from quantexp.model.huggingface.fit import fitting_weights, require_same_numbers
from quantexp.model.huggingface.weights import open_weights
from quantexp.model.layout import Layout
from quantexp.quant.precision import changes, entry_record, precision_map
from quantexp.runs.device import multiplies_natively
from quantexp.schema import DatasetConfig, Experiment, ModelConfig, Nonfinite

#: Incremented whenever the values of a format, a product or the initial weights change.
NUMERICS_VERSION = 2


def identity(experiment: Experiment, device_class: str) -> dict[str, Any]:
    """The hashed content, readable as JSON.

    Raises:
        DataError: a dataset, tokenizer or weights are missing, or the weights are another model's.
    """
    training = dataclasses.asdict(experiment.training)
    model = _model(experiment.model)
    attention_path = experiment.training.attention.value
    training.pop("attention")
    if experiment.training.decay_iterations is None:
        training.pop("decay_iterations")
    if experiment.training.nonfinite is Nonfinite.skip:
        training.pop("nonfinite")
    if not experiment.training.chaos:
        training.pop("chaos")
    if not _shares_draws(experiment):
        training.pop("weight_cache")
    data = data_identity(experiment.dataset, experiment.model.vocab_size)
    for part, label in (
        (training, "name"),
        (training, "start_from"),
        (training, "start_optimizer"),
        (training, "restart"),
        (training, "distributed_optimizer"),
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
        "data_parallel": Layout.of(experiment).data,
        **_layout(experiment),
        "numerics": NUMERICS_VERSION,
    }


def _model(model: ModelConfig) -> dict[str, Any]:
    """The model's numbers; MLA, MoE and published weights are included only if the model has them.

    Published weights enter by the fingerprint of their content.

    Raises:
        DataError: the weights are missing, damaged or another model's.
    """
    numbers = dataclasses.asdict(model)
    numbers.pop("from_hf")
    if numbers.pop("init_from") is not None:
        require_published(user_path(str(model.init_from)), f"model.init_from={model.init_from}")
        numbers["initial_weights"] = weights_fingerprint(model)
    for part in ("mla", "moe"):
        if numbers[part] is None:
            numbers.pop(part)
    if model.moe is not None:
        numbers["moe"]["aux_loss"] = model.moe.aux_loss.value
    return numbers


def _layout(experiment: Experiment) -> dict[str, dict[str, Any]]:
    """The sizes that change the order of sums; empty for a model that is not divided.

    Stages change it only where they share the embedding: its two gradients are then added in fp32. Chunks of layers and
    shares of the optimizer never do.
    """
    layout, parallel = Layout.of(experiment), experiment.parallel
    sizes: dict[str, Any] = {}
    if layout.tensor > 1:
        sizes |= {"tensor": layout.tensor, "sequence": layout.sequence}
    if layout.context > 1:
        sizes["context"] = layout.context
    if layout.expert > 1:
        sizes |= {"expert": layout.expert, "expert_tensor": layout.expert_tensor}
        sizes["dispatcher"] = parallel.dispatcher.value
    if layout.pipeline > 1 and experiment.model.tie_embeddings:
        sizes["pipeline"] = layout.pipeline
    return {"layout": sizes} if sizes else {}


def hash8(content: dict[str, Any]) -> str:
    """The first 8 hex digits of the content's sha256."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def folder_name(experiment: Experiment, content: dict[str, Any]) -> str:
    """`<model>_<dataset>_<scheme>-<hash8>`."""
    quant = experiment.quant.name
    return f"{experiment.model.name}_{experiment.dataset.name}_{quant}-{hash8(content)}"


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


def _start(experiment: Experiment, data: dict[str, str]) -> dict[str, Any]:
    """The fingerprints of the checkpoint that a run starts from; empty if it starts from none.

    Raises:
        DataError: the checkpoint is missing, of another model, or of a run with other data.
    """
    point, option = start_point(experiment), f"training.start_from={experiment.training.start_from}"
    if point is None:
        return {}
    if recorded_data(point) != data:
        raise DataError(
            f"{option} has its place in other data than dataset={experiment.dataset.label}"
        )
    content: dict[str, Any] = {"iteration": point.iteration}
    if point.is_in_shards:
        require_same_numbers(experiment.model, point.weights / CONFIG, option)
        content["state"] = point.state_fingerprint()
    else:
        content["weights"] = weights_fingerprint(experiment.model, point.weights, option)
    if point.padding.is_file():
        content["padding"] = open_weights(point.padding).fingerprint()
    if experiment.training.start_optimizer:
        content["optimizer"] = point.state_fingerprint()
    return {"start": content}


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


def _products(experiment: Experiment, device_class: str) -> dict[str, str]:
    """Records 16-bit products that go through fp32; empty for native kernels, and for jobs, whose CPU is unknown."""
    if device_class != "cpu" or not experiment.launcher.is_local:
        return {}
    native = multiplies_natively(experiment.training.precision)
    return {} if native else {"products": "fp32"}


def _shares_draws(experiment: Experiment) -> bool:
    """Whether the weight cache makes the micro-batches of a step share one stochastic rounding of a weight.

    This is the only case in which the cache changes numbers; any other cached copy equals a recomputed one bit for bit.
    In all other cases, and for steps of a single micro-batch, the identity is the same as without a weight cache.
    """
    training = experiment.training
    return (
        training.weight_cache
        and training.global_batch_size > training.micro_batch_size
        and any(
            entry.spec.once_per_step and entry.spec.rounding is Rounding.STOCHASTIC
            for iteration in changes(experiment.quant)
            if iteration <= training.iterations
            for declared in precision_map(experiment.model, experiment.quant, iteration).values()
            for entry in declared.entries()
        )
    )


def _scheme(experiment: Experiment) -> list[Any]:
    """The precision map at each iteration where it changes."""
    return [
        [iteration, [entry_record(e) for module in declared.values() for e in module.entries()]]
        for iteration in changes(experiment.quant)
        if iteration <= experiment.training.iterations
        for declared in (precision_map(experiment.model, experiment.quant, iteration),)
    ]
