"""`quantexp branch RUN... quant=SCHEME,...`: schemes on short branches from the checkpoints of runs."""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantexp.analysis.compare.arguments import named_runs, out_and_rest
from quantexp.cli.arguments import parser_of, root_and_rest
from quantexp.cli.output import complain, print_json, print_line, require_folder
from quantexp.errors import ConfigError
from quantexp.extras.resolve.arms import BASELINE, arms_of, controls_of
from quantexp.extras.resolve.design import Design, bases_of, checkpoints_of, design_of
from quantexp.extras.resolve.driving import Driver
from quantexp.extras.resolve.outcome import outcome_of
from quantexp.extras.resolve.results import Line, read_results
from quantexp.terminal.console import error_console, output_console

#: What may be changed of how branches run: how these words begin.
_CHANGEABLE = ("launcher.", "memory=")
#: What composes schemes: how these words begin.
_SCHEMES = ("quant=", "quant.", "quant/")


def run(arguments: argparse.Namespace) -> int:
    """Run the branches that are missing, and show what they say; returns 1 if a branch's proof failed.

    Raises:
        QuantexpError: no such design, or its branches cannot run.
    """
    request = _request(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        formats = Path(temporary) if request.is_dry else request.folder
        return _run(request, formats, arguments)


def _run(request: _Request, formats: Path, arguments: argparse.Namespace) -> int:
    """The design with its noise formats in a folder, planned or run."""
    results = read_results(request.folder)
    design = _design(request, formats, results, arguments.config_dir)
    missing = [branch for branch in design.branches if not design.has(branch, results)]
    if request.is_dry:
        from quantexp.extras.resolve.plan import plan_of, print_plan

        plan = plan_of(design, missing, results, arguments.margin)
        if arguments.json:
            print_json(plan)
        else:
            print_plan(plan, output_console())
        return 0
    failures = Driver(design, missing, error_console()).run() if missing else []
    for words in failures:
        complain(f"the proof failed in {words}")
    _show(design, read_results(request.folder), arguments)
    return 1 if failures else 0


@dataclass(frozen=True)
class _Request:
    """The command line, checked as far as no run is read."""

    runs: tuple[str, ...]
    root: Path
    #: What composes schemes, and what changes how branches run.
    schemes: tuple[str, ...]
    overrides: tuple[str, ...]
    against: str
    folder: Path
    is_dry: bool
    steps: tuple[int, ...]
    checkpoints: tuple[int, ...] | None
    tokens: int
    controls: tuple[str, ...]


def _request(arguments: argparse.Namespace) -> _Request:
    """The request of a command line.

    Raises:
        ConfigError: a word or flag that no design can have.
    """
    words, folder, is_dry, against = _settings(arguments.words)
    root, words = root_and_rest(words)
    if arguments.tokens < 1:
        raise ConfigError(f"--tokens must be at least 1, got {arguments.tokens}")
    if not 0 < arguments.margin < math.inf:
        raise ConfigError(f"--margin must be greater than 0, got {arguments.margin}")
    names = tuple(word for word in words if "=" not in word)
    overrides = tuple(word for word in words if word.startswith(_CHANGEABLE))
    schemes = tuple(word for word in words if word.lstrip("+~").startswith(_SCHEMES))
    for word in words:
        if word not in (*names, *overrides, *schemes):
            raise ConfigError(
                f"{word} has no effect on quantexp branch, which trains as the runs did but for quant: drop it"
            )
    if not names:
        parser_of("branch").error("branch needs RUN: a run, a part of its name, or their folder")
    asked = None if arguments.start is None else _numbers("from", arguments.start)
    steps, controls = _numbers("steps", arguments.steps), controls_of(arguments.control)
    return _Request(
        *(names, root, schemes, overrides, against, folder, is_dry),
        *(steps, asked, arguments.tokens, controls),
    )


def _settings(words: Sequence[str]) -> tuple[list[str], Path, bool, str]:
    """The words without `out=`, `dry_run=` and `against=`, and the values of these."""
    out, rest = out_and_rest(words)
    folder = out or Path("branch")
    require_folder(folder)
    given = dict(word.split("=", 1) for word in rest if word.startswith(("dry_run=", "against=")))
    rest = [word for word in rest if not word.startswith(("dry_run=", "against="))]
    is_dry = given.get("dry_run", "false").lower()
    if is_dry not in ("true", "false"):
        raise ConfigError(f"dry_run must be true or false, got {is_dry}")
    return rest, folder, is_dry == "true", given.get("against") or BASELINE


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    """The whole numbers of a flag's `A,B`.

    Raises:
        ConfigError: one is none, or below 1.
    """
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--{flag} must be whole numbers of at least 1, as 10,50, got {text}")
    return tuple(sorted({int(part) for part in parts}))


def _design(
    request: _Request, formats: Path, results: Mapping[str, Line], config_dir: Path | None
) -> Design:
    steps = request.steps
    bases = bases_of(named_runs(request.runs, request.root).runs)
    checkpoints = checkpoints_of(bases, request.checkpoints, steps[-1])
    arms = arms_of(
        *(bases[0], checkpoints[0], request.schemes, request.against, request.controls),
        *(config_dir, formats),
    )
    return design_of(
        *(request.folder, bases, checkpoints, arms, steps, request.tokens),
        *(request.overrides, results),
    )


def _show(design: Design, results: Mapping[str, Line], arguments: argparse.Namespace) -> None:
    """Print the verdicts and draw them."""
    from quantexp.extras.resolve.figure import draw_outcome
    from quantexp.extras.resolve.table import print_outcome, record

    outcome = outcome_of(design, results, arguments.margin)
    if arguments.json:
        print_json(record(outcome))
        return
    print_outcome(outcome, output_console())
    files = draw_outcome(outcome, design.folder)
    if files:
        print_line(f"figure  {' '.join(map(str, files))}")
