"""Finds the baseline of a run; without one, explains why and how to create it.

A baseline is a bf16 run of the same model and data that has losses. Between several it is the one that the run is
matched with, or differs least from. A quantised run is never a baseline: its own error would be in the gap.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantexp.analysis.compare.matched import Mismatch, mismatches
from quantexp.analysis.compare.side import BASELINE, Side
from quantexp.folders import shell_line

#: Keys of a model's identity that determine its initial weights.
_INITIAL = ("initial_weights", "init_std")
#: Beginnings of a command's words that the command for a baseline does not have.
_REPLACED = ("quant=", "quant/", "quant.", "training.chaos=")


def baseline_of(side: Side, sides: Sequence[Side]) -> tuple[int, list[Mismatch]] | str:
    """The index of a run's baseline with the mismatches of the pair, or the reason why there is none."""
    reasons = {i: unfit(side, other) for i, other in enumerate(sides) if other.is_baseline}
    fit = [i for i, reason in reasons.items() if reason is None]
    if fit:
        place, differences = closest(side, [sides[i] for i in fit])
        return fit[place], differences
    if not reasons and any(other.is_perturbed for other in sides):
        return f"there is no {BASELINE} run with unperturbed initial weights among these"
    if not reasons:
        return f"there is no {BASELINE} run among these"
    kinds = [*dict.fromkeys(reason for reason in reasons.values() if reason)]
    several = len(reasons) > 1
    return f"the {BASELINE} run{'s' * several} {'are' if several else 'is'} {' or '.join(kinds)}"


def closest(side: Side, others: Sequence[Side]) -> tuple[int, list[Mismatch]]:
    """The index of the run that differs least, at least one, with the mismatches of the pair."""
    candidates = [mismatches(side, other) for other in others]
    return min(enumerate(candidates), key=lambda candidate: len(candidate[1]))


def unfit(side: Side, other: Side) -> str | None:
    """Why a run cannot be held against another one, as a phrase after "is"; None if it can."""
    if not other.losses.iterations:
        return "without a loss"
    if _model(side, other) != _model(other, side):
        return f"of another model, {other.names.model_label or other.names.model}"
    if side.names.dataset != other.names.dataset:
        return f"of other data, {other.names.dataset}"
    return None


def _model(side: Side, other: Side) -> object:
    """The key that decides whether two runs have the same model: its numbers if both have them, else its name.

    How its weights begin is left to `mismatches`, which says that of a baseline.
    """
    numbers, others = ((one.identity or {}).get("model") for one in (side, other))
    if not (isinstance(numbers, dict) and numbers and others):
        return side.names.model
    return {key: value for key, value in numbers.items() if key not in _INITIAL}


def how_to_make_one(side: Side) -> str:
    """The command that creates a baseline for this run: its own with quant=bf16, and without perturbed weights."""
    command = (side.provenance or {}).get("command")
    words = [str(word) for word in command[1:]] if isinstance(command, list) else []
    own = [word for word in words if not word.lstrip("+~").startswith(_REPLACED)]
    if not words or any(map(_is_verb, ["", *words], words)):
        return f"to make one, run its command with quant={BASELINE}"
    return f"to make one: quantexp {shell_line([*own, f'quant={BASELINE}'])}"


def _is_verb(before: str, word: str) -> bool:
    """Whether an argument of a command is neither a flag, nor a flag's value, nor an override."""
    return "=" not in word and word[:1] not in "-~" and before not in ("-cd", "--config-dir")
