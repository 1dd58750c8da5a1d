"""`quantexp report DIR ... [out=PATH]`: writes one page about runs, which works offline."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from quantexp.analysis.compare.arguments import named_runs, out_and_rest
from quantexp.cli.arguments import parser_of, root_and_rest
from quantexp.cli.output import print_line
from quantexp.folders import user_path
from quantexp.runs.paths import RunDir


def run(arguments: argparse.Namespace) -> int:
    """Write the page and print its path; returns 0.

    Raises:
        RunError: see `write_report`.
        ConfigError: `out=` without a path.
    """
    root, words = root_and_rest(arguments.words)
    out, words = out_and_rest(words)
    if not words:
        parser_of("report").error("report takes runs: DIR ...")
    print_line(str(write_report(words, root, out)))
    return 0


def write_report(words: Sequence[str], root: Path, out: Path | None) -> Path:
    """Write the report of the named runs; returns the file.

    Without `out` a run's page lies in its folder, that of a folder of runs in it, a sweep's beside its list, and that
    of anything else in the working directory.

    Raises:
        RunError: a word that names no run, or a file that cannot be written.
    """
    from quantexp.analysis.report.write import write_page

    named = named_runs(words, root)
    return write_page(named, out if out is not None else _place(words, named.runs))


def _place(words: Sequence[str], runs: Sequence[RunDir]) -> Path:
    from quantexp.analysis.report.write import FILE_NAME

    path = user_path(words[0])
    if len(words) == 1 and path.is_file():
        return path.with_suffix(".html")
    if len(runs) == 1:
        return runs[0].report
    if len(words) == 1 and path.is_dir():
        return path / FILE_NAME
    return Path(FILE_NAME)
