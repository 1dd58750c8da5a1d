"""`quantexp compare RUN ...`: runs beside bf16, whether gaps can be told from noise, as tables and a figure."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from quantexp.analysis.compare import comparison
from quantexp.analysis.compare.arguments import judging_and_rest, named_runs, out_and_rest
from quantexp.analysis.compare.comparison import Comparison
from quantexp.analysis.compare.side import read_side
from quantexp.analysis.compare.table import print_comparison
from quantexp.analysis.compare.verdicts import Verdicts, judge
from quantexp.cli.arguments import parser_of, root_and_rest
from quantexp.cli.output import print_json, print_line, require_folder
from quantexp.errors import RunError
from quantexp.folders import writing_into
from quantexp.runs.evaluation import is_evaluation
from quantexp.terminal.console import output_console


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison and draw its curves, with `--json` only if `out=` names a place; returns 0.

    Raises:
        RunError: a word that names no run, runs that cannot be compared, or a folder that cannot be written.
        ConfigError: `out=` without a path, or a word that says nothing about the verdicts.
    """
    root, words = root_and_rest(arguments.words)
    out, words = out_and_rest(words)
    judging, words = judging_and_rest(words)
    if not words:
        parser_of("compare").error("compare takes runs: RUN ...")
    folder = Path("compare") if out is None and not arguments.json else out
    if folder is not None:
        require_folder(folder)
    named = named_runs(words, root)
    if all(map(is_evaluation, named.runs)) and named.runs:
        raise RunError(
            f"{' '.join(words)} holds evaluations without training, which quantexp report compares"
        )
    sides = [read_side(each, judging.measure) for each in named.runs]
    compared = comparison.compare(sides, named.missing)
    verdicts = judge(compared, judging.window, judging.against)
    if arguments.json:
        print_json(record(compared, verdicts))
    else:
        show(compared, verdicts, output_console())
    if folder is not None:
        from quantexp.analysis.compare.curves import draw_curves

        with writing_into(folder, RunError, "out=FOLDER"):
            files = draw_curves(compared, verdicts, folder)
        if not arguments.json:
            print_line(f"figure  {' '.join(map(str, files))}")
    return 0


def record(compared: Comparison, verdicts: Verdicts) -> dict[str, Any]:
    """The output of `compare --json`."""
    return {
        "noise": verdicts.noise,
        **comparison.record(compared),
        "verdicts": asdict(verdicts),
    }


def show(compared: Comparison, verdicts: Verdicts, console: Console) -> None:
    """Print the tables."""
    print_comparison(compared, verdicts, console)
