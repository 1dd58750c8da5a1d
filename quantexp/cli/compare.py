"""`quantexp compare RUN ... [out=FOLDER]`: runs beside bf16, as a table and a figure."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from quantexp.analysis.compare import comparison
from quantexp.analysis.compare.arguments import named_runs, out_and_rest
from quantexp.analysis.compare.comparison import Comparison
from quantexp.analysis.compare.side import read_side
from quantexp.analysis.compare.table import print_comparison
from quantexp.cli.arguments import parser_of, root_and_rest
from quantexp.cli.output import print_json, print_line
from quantexp.terminal.console import output_console


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison and draw its curves, with `--json` only if `out=` names a place; returns 0.

    Raises:
        RunError: a word that names no run, or runs that cannot be compared.
        ConfigError: `out=` without a path.
    """
    root, words = root_and_rest(arguments.words)
    out, words = out_and_rest(words)
    if not words:
        parser_of("compare").error("compare takes runs: RUN ...")
    named = named_runs(words, root)
    compared = comparison.compare([read_side(each) for each in named.runs], named.missing)
    if arguments.json:
        print_json(record(compared))
    else:
        show(compared, output_console())
    if out is not None or not arguments.json:
        from quantexp.analysis.compare.curves import draw_curves

        files = draw_curves(compared, out or Path("compare"))
        if not arguments.json:
            print_line(f"figure  {' '.join(map(str, files))}")
    return 0


def record(compared: Comparison) -> dict[str, Any]:
    """The output of `compare --json`."""
    return comparison.record(compared)


def show(compared: Comparison, console: Console) -> None:
    """Print the table."""
    print_comparison(compared, console)
