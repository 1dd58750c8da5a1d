"""The labels of compared runs: the scheme, and what distinguishes the run from the others."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import relpath
from typing import Any

from quantexp.analysis.compare.leaves import distinguishing, leaves
from quantexp.analysis.compare.matched import code_words
from quantexp.analysis.compare.side import Side

#: Sections and keys that do not affect the results, or that the precision map covers.
NOT_COMPARED = ("quant", "paths", "tracking", "analysis", "dry_run", "force", "sweep")
#: Further ones that do not affect the results, though a reader may want to know of the difference.
_WITHOUT_NUMBERS = ("capture", "checkpoint", "launcher", "memory", "code")
SEED, CHAOS, PROCESSES = "training.seed", "training.chaos", "launcher.num_processes"


def is_of_no_matter(key: str) -> bool:
    """Whether a key may differ between runs of one line."""
    group = key.partition(".")[0]
    return group != "quant" and key != PROCESSES and group in (*NOT_COMPARED, *_WITHOUT_NUMBERS)


def labels_of(sides: Sequence[Side]) -> list[str]:
    """The scheme of each run, with the options, model, data, code and seed that distinguish it from the others.

    Perturbed runs always show their number. Runs that differ in nothing that affects the results are told apart by
    their folders' hashes, and copies of a folder by where they lie.
    """
    options = _options(sides)
    parts = [
        (
            s.scheme,
            options[i],
            f"chaos {s.chaos}" if s.chaos else None,
            s.names.model,
            s.names.dataset,
            f"code {code_words(s)}",
            None if s.seed is None else f"seed {s.seed}",
        )
        for i, s in enumerate(sides)
    ]
    shown = [i for i in range(7) if i < 3 or len({part[i] for part in parts}) > 1]
    labels = [" ".join(str(part[i]) for i in shown if part[i] is not None) for part in parts]
    by_hash = [f" {side.run.root.name.rpartition('-')[2]}" for side in sides]
    by_folder = [f" in {relpath(side.run.root.parent)}" for side in sides]
    for more in (by_hash, by_folder):
        repeated = {label for label in labels if labels.count(label) > 1}
        labels = [
            label + words if label in repeated else label
            for label, words in zip(labels, more, strict=True)
        ]
    return labels


def _options(sides: Sequence[Side]) -> list[str | None]:
    """The options other than seed and chaos in which each run differs from others of its scheme, model and data."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, s in enumerate(sides):
        groups.setdefault((s.scheme, str(s.names.model), str(s.names.dataset)), []).append(i)
    options: list[str | None] = [None] * len(sides)
    for group in groups.values():
        contents = [_in_common(sides[i]) for i in group]
        for i, words in zip(group, _fewest(distinguishing(contents)), strict=True):
            options[i] = words or None
    return options


def _in_common(side: Side) -> dict[str, Any]:
    """The flat configuration that the runs of one line have in common."""
    flat = leaves(side.config)
    return {k: v for k, v in flat.items() if k not in (SEED, CHAOS) and not is_of_no_matter(k)}


def _fewest(options: Sequence[Sequence[str]]) -> list[str]:
    """The options of each run without those that distinguish no more runs than earlier ones do."""
    shown = [""] * len(options)
    for words in zip(*options, strict=True):
        more = [f"{one} {word}".lstrip() for one, word in zip(shown, words, strict=True)]
        if len(set(more)) > len(set(shown)):
            shown = more
    return shown


def without_seed(label: str, side: Side) -> str:
    """The label without the run's seed; of a perturbed bf16 run also without its number."""
    label = label.replace(f" seed {side.seed}", "")
    return label.replace(f" chaos {side.chaos}", "") if side.is_perturbed else label
