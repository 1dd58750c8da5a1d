"""Resolves the arguments of `compare` and `report` to runs and an output path. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantexp.errors import ConfigError
from quantexp.folders import user_path
from quantexp.runs.evaluation import is_evaluation
from quantexp.runs.find import Missing, scope
from quantexp.runs.gradients import is_gradient
from quantexp.runs.paths import RunDir

_NOT_TRAINED = "it evaluates without training; quantexp evaluate and quantexp report show it"
_GRADIENTS = "it compares gradients without training; quantexp bisect --gradient shows it"


@dataclass(frozen=True)
class Runs:
    """The named runs without repeats, in the order given, and the runs of sweeps without folders."""

    runs: tuple[RunDir, ...]
    missing: tuple[Missing, ...] = ()


def named_runs(words: Sequence[str], root: Path) -> Runs:
    """The runs of the arguments: each is a run, a part of a run's name, a sweep's list or a folder of runs.

    Beside trained runs, evaluations without training count as missing.

    Raises:
        RunError: a word that is none of these, by itself.
    """
    scopes = [scope(word, root) for word in words]
    runs = dict.fromkeys(run.root.resolve() for one in scopes for run in one.runs)
    missing = [gone for one in scopes for gone in one.missing]
    named = tuple(RunDir(folder) for folder in runs)
    trained = tuple(run for run in named if not (is_evaluation(run) or is_gradient(run)))
    if trained:
        missing += [
            Missing(run.root.name, _GRADIENTS if is_gradient(run) else _NOT_TRAINED)
            for run in named
            if run not in trained
        ]
    return Runs(trained or named, tuple(missing))


def out_and_rest(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The path of the last `out=PATH`, and the other arguments.

    Raises:
        ConfigError: `out=` without a path.
    """
    outputs = [word for word in words if word.startswith("out=")]
    rest = [word for word in words if word not in outputs]
    if not outputs:
        return None, rest
    path = outputs[-1].removeprefix("out=")
    if not path:
        raise ConfigError("out must be a path, got nothing; give out=PATH")
    return user_path(path), rest


#: Measures of metrics.jsonl that runs can be compared by.
MEASURES = ("loss", "validation_loss", "unquantised_loss", "perplexity", "grad_norm")
_EVALUATION = "evaluation.every=N records it after every N iterations"
#: How a training records the measures besides the loss.
HOW_TO_RECORD = {
    "validation_loss": _EVALUATION,
    "unquantised_loss": f"{_EVALUATION}, with evaluation.unquantised=true",
    "perplexity": _EVALUATION,
    "grad_norm": "a training records it in every iteration",
}


@dataclass(frozen=True)
class Judging:
    """What verdicts are about."""

    measure: str = "loss"
    #: Last iterations; None for a tenth of them.
    window: int | None = None
    #: The scheme that the others are held against; None for bf16.
    against: str | None = None


def judging_and_rest(words: Sequence[str]) -> tuple[Judging, list[str]]:
    """The last `measure=`, `window=` and `against=`, and the other arguments.

    Raises:
        ConfigError: an unknown measure, a window that is no number of iterations, or no scheme.
    """
    keys = ("measure", "window", "against")
    given = dict(word.split("=", 1) for word in words if word.partition("=")[0] in keys)
    rest = [word for word in words if word.partition("=")[0] not in keys]
    measure, window, against = (
        given.get("measure", "loss"),
        given.get("window"),
        given.get("against"),
    )
    if measure not in MEASURES:
        raise ConfigError(
            f"measure must be one of {', '.join(MEASURES)}, got {measure or 'nothing'}"
        )
    if window is not None and not (window.isascii() and window.isdigit() and int(window)):
        raise ConfigError(
            f"window must be a number of iterations, at least 1, got {window or 'nothing'}"
        )
    if against == "":
        raise ConfigError("against must be a scheme, got nothing; give against=SCHEME")
    return Judging(measure, None if window is None else int(window), against), rest
