"""Labels of the runs of a sweep: the options in which they differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from enum import Enum
from typing import Any

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
        for i, differs in zip(group, _differing([experiments[i] for i in group]), strict=True):
            options[i] = differs
    return options


def _differing(experiments: list[Experiment]) -> list[list[str]]:
    """For each run the options that differ between runs: a section's choice (`training=fast`) or a key (`seed=2`)."""
    leaves = [dict(_leaves(experiment)) for experiment in experiments]
    keys = [
        key
        for key in dict.fromkeys(k for leaf in leaves for k in leaf)
        if _distinguishes(key, leaves)
    ]
    return [[f"{_short(key)}={leaf.get(key)}" for key in keys] for leaf in leaves]


def _distinguishes(key: str, leaves: list[dict[str, str]]) -> bool:
    """Whether a key differs between runs with the same choice of its section; different choices imply the rest."""
    choice = f"{key.partition('.')[0]}.name"
    by_choice: dict[str | None, set[str | None]] = {}
    for leaf in leaves:
        same = None if key == choice else leaf.get(choice)
        by_choice.setdefault(same, set()).add(leaf.get(key))
    return any(len(values) > 1 for values in by_choice.values())


def _short(key: str) -> str:
    section, _, name = key.partition(".")
    return section if name == "name" else key.rpartition(".")[2]


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
