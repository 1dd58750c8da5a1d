"""Keys of an experiment that follow from others: the built-in sample's tokenizer, where a capture begins, processes."""

from __future__ import annotations

import dataclasses
import math

from quantexp.errors import ConfigError
from quantexp.schema import Experiment
from quantexp.schema.dataset import DEFAULT_SPLIT, SYNTHETIC, TokenizerKind

#: The number of bytes, plus one for the end of a document.
BYTE_VOCAB_SIZE = 257


def complete_start(experiment: Experiment) -> None:
    """Make a run that starts from a checkpoint capture from its own first iteration."""
    capture = experiment.capture
    capture.first_iteration = max(capture.first_iteration, experiment.first_iteration)


def complete_dataset(experiment: Experiment) -> None:
    """Fill in what the dataset implies: label, tokenizer and split; for the built-in sample the vocabulary too.

    Raises:
        ConfigError: a key is set that the dataset determines.
        DataError: the dataset's card cannot be read.
    """
    dataset = experiment.dataset
    if dataset.label is not None:
        raise ConfigError(
            f"dataset.label follows from the dataset and cannot be set, got {dataset.label!r}"
        )
    dataset.sample = dataset.sample and dataset.path is None and not dataset.blend
    if not dataset.sample:
        from quantexp.data.prepared import complete

        complete(dataset)
        return
    for key in ("tokenizer_path", "tokenizer_pattern", "eod"):
        if (value := getattr(dataset, key)) is not None:
            raise ConfigError(
                f"dataset.{key}={value} cannot hold with the built-in sample, which has a "
                "byte tokenizer; give dataset.path too, or drop it"
            )
    if dataset.source is not None:
        from quantexp.data.prepared import default_prefix

        raise ConfigError(
            f"dataset.source={dataset.source} is text for `quantexp prepare`, which a run does not read, and cannot "
            f"hold with the built-in sample; prepare it, and give dataset.path={default_prefix(dataset.name)}, or "
            "drop it"
        )
    if experiment.model.init_from is not None:
        raise ConfigError(
            f"model.init_from={experiment.model.init_from} cannot hold with the built-in sample, whose byte "
            "tokenizer has not the ids of published weights; give dataset.path and dataset.tokenizer_path too"
        )
    dataset.tokenizer = TokenizerKind.byte
    experiment.model.vocab_size = BYTE_VOCAB_SIZE
    dataset.split = dataset.split or DEFAULT_SPLIT
    kind = "generated" if dataset.name == SYNTHETIC else "built-in sample"
    dataset.label = f"{dataset.name} ({kind})"


def with_num_processes(experiment: Experiment) -> Experiment:
    """The experiment itself, or with `launcher.num_processes=0` the one with a number.

    It is a process for each requested GPU, or else the fewest that the layout needs, equally many on every node.
    """
    launcher = experiment.launcher
    if launcher.num_processes:
        return experiment
    if launcher.gpus_per_node:
        number = launcher.nodes * launcher.gpus_per_node
    else:
        number = math.lcm(launcher.nodes, _fewest(experiment))
    complete = dataclasses.replace(launcher, num_processes=max(1, number))
    return dataclasses.replace(experiment, launcher=complete)


def _fewest(experiment: Experiment) -> int:
    """The smallest number of processes in which every group of the layout is complete."""
    parallel = experiment.parallel
    dense = parallel.tensor * parallel.context * parallel.pipeline
    if experiment.model.moe is None:
        return dense
    return math.lcm(dense, parallel.expert * (parallel.expert_tensor or 1) * parallel.pipeline)
