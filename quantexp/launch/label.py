"""Labels of the runs of a sweep: the options in which they differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from enum import Enum
from typing import Any

from quantexp.analysis.compare.leaves import distinguishing
from quantexp.schema import Experiment

#: Sections whose keys may distinguish runs of the same names.
_SECTIONS = ("training", "model", "dataset", "quant", "capture", "parallel", "launcher")
#: Keys that are derived from others.
_DERIVED = ("dataset.sample", "dataset.label", "dataset.tokenizer", "model.vocab_size")


def labels(experiments: Sequence[Experiment]) -> list[str]:
    """A label for each run: the scheme, model and dataset if they differ, and the keys that distinguish equal names."""
    named = [names(experiment) for experiment in experiments]
    shown = [i for i in range(3) if i == 2 or len({name[i] for name in named}) > 1]
    return [
        " ".join([*(name[i] for i in shown), *differs])
        for name, differs in zip(named, differences(experiments), strict=True)
    ]


def names(experiment: Experiment) -> tuple[str, str, str]:
    """Model, dataset and scheme."""
    return experiment.model.name, experiment.dataset.name, str(experiment.quant.name)


def differences(experiments: Sequence[Experiment]) -> list[list[str]]:
    """For each run the options (`seed=2`) that distinguish it from others of its model, dataset and scheme."""
    options: list[list[str]] = [[] for _ in experiments]
    groups: dict[tuple[str, str, str], list[int]] = {}
    for i, experiment in enumerate(experiments):
        groups.setdefault(names(experiment), []).append(i)
    for group in groups.values():
        contents = [dict(_leaves(experiments[i])) for i in group]
        for i, differs in zip(group, distinguishing(contents), strict=True):
            options[i] = differs
    return options


def _leaves(experiment: Experiment) -> Iterator[tuple[str, str]]:
    content = asdict(experiment)
    for section in _SECTIONS:
        yield from _below(section, content[section])


def _below(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _below(f"{key}.{name}", inner)
    elif key not in _DERIVED:
        yield key, str(value.value if isinstance(value, Enum) else value)
