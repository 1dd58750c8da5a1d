"""`quantexp report DIR... [out=PATH]`: which runs, and where their page goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantexp.analysis.compare.arguments import named_runs
from quantexp.analysis.report.write import FILE_NAME, write_page
from quantexp.runs.paths import RunDir


def run_report(words: Sequence[str], root: Path, out: Path | None) -> Path:
    """Write the report of what the words name; returns the file.

    Without `out` a run's page lies in its folder, that of a folder of runs in it, a sweep's beside its list, and that
    of anything else in the working directory.

    Raises:
        RunError: a word that names no run, or a file that cannot be written.
    """
    named = named_runs(words, root)
    return write_page(named, out if out is not None else _place(words, named.runs))


def _place(words: Sequence[str], runs: Sequence[RunDir]) -> Path:
    path = Path(words[0]).expanduser()
    if len(words) == 1 and path.is_file():
        return path.with_suffix(".html")
    if len(runs) == 1:
        return runs[0].report
    if len(words) == 1 and path.is_dir():
        return path / FILE_NAME
    return Path(FILE_NAME)
