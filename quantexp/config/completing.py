"""Keys of an experiment that follow from others: the built-in sample's tokenizer, and where a capture begins."""

from __future__ import annotations

from quantexp.data.completed import complete
from quantexp.errors import ConfigError
from quantexp.model.checkpoints import first_iteration
from quantexp.schema import Experiment, TokenizerKind

#: The number of bytes, plus one for the end of a document.
BYTE_VOCAB_SIZE = 257


def complete_start(experiment: Experiment) -> None:
    """Make a run that starts from a checkpoint capture from its own first iteration."""
    capture = experiment.capture
    capture.first_iteration = max(capture.first_iteration, first_iteration(experiment))


def complete_dataset(experiment: Experiment) -> None:
    """Fill in what the dataset implies: for the built-in sample its tokenizer and vocabulary.

    Raises:
        ConfigError: a key is set that the dataset determines.
    """
    dataset = experiment.dataset
    if dataset.label is not None:
        raise ConfigError(
            f"dataset.label follows from the dataset and cannot be set, got {dataset.label!r}"
        )
    dataset.sample = dataset.sample and dataset.path is None and not dataset.blend
    if dataset.sample:
        for key in ("tokenizer_path", "tokenizer_pattern", "eod"):
            if (value := getattr(dataset, key)) is not None:
                raise ConfigError(
                    f"dataset.{key}={value} cannot hold with the built-in sample, which has a "
                    "byte tokenizer; give dataset.path too, or drop it"
                )
        if experiment.model.init_from is not None:
            raise ConfigError(
                f"model.init_from={experiment.model.init_from} cannot hold with the built-in sample, whose byte "
                "tokenizer has not the ids of published weights; give dataset.path and dataset.tokenizer_path too"
            )
        dataset.tokenizer = TokenizerKind.byte
        experiment.model.vocab_size = BYTE_VOCAB_SIZE
    complete(dataset)
