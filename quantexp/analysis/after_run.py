"""Draws what `analysis.auto` selects: for a finished run, for a skipped run, and for a finished sweep.

A run that ends is drawn by a child of its rank 0, `python -m quantexp.analysis.after_run`, which `training.drawing`
starts. One that is skipped, since it has completed before, gets from the process that skips it what its folder does not
have yet. A sweep's report is written by the process that worked through it, beside its list. A failure to draw is
printed and changes no run's state.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from quantexp.errors import QuantexpError
from quantexp.extra import Service, service
from quantexp.folders import for_shell, short_path
from quantexp.processes.with_parent import end_with_parent
from quantexp.runs.disk import first_line
from quantexp.runs.evaluation import is_evaluation
from quantexp.runs.paths import RunDir
from quantexp.schema import AutoDraw

#: Time limit in seconds for reading captured values in the report of a run; a sweep's report has as much for each run.
REPORT_LOOK_S = 1.0


def draw_figures(run: RunDir, drawing: AutoDraw) -> None:
    """The run's figures: the whole tree, or one picture; of an evaluation its results.

    Raises:
        CaptureError: they cannot be drawn.
        UnreadableError: the results of an evaluation cannot be read.
    """
    if is_evaluation(run):
        draw_evaluation = service(Service.EVALUATION_FIGURE)
        if draw_evaluation is not None:
            draw_evaluation(run)
    elif drawing is AutoDraw.everything:
        from quantexp.analysis.draw.verb import draw_run

        draw_run(run)
    elif drawing is AutoDraw.quick:
        from quantexp.analysis.quick.picture import draw_quick_analysis

        run.figures.mkdir(exist_ok=True)
        draw_quick_analysis(run.root, run.figures)


def draw_skipped(run: RunDir, drawing: AutoDraw, console: Console) -> None:
    """Create the selected figures and report of a skipped run if they are missing."""
    if drawing is AutoDraw.nothing:
        return
    if is_evaluation(run):
        lacks_picture = not (run.figures / "evaluation.png").exists()
    else:
        picture = run.figures / "quick_analysis.png"
        lacks_picture = drawing is AutoDraw.everything or not picture.exists()
    if not lacks_picture and run.report.exists():
        return
    with _report_failure(f"{run.root.name} was not drawn", console):
        from quantexp.analysis.report.write import write_report

        if drawing is AutoDraw.everything:
            console.print(f"drawing    {escape(run.root.name)}", soft_wrap=True)
        if lacks_picture:
            draw_figures(run, drawing)
        write_report([run.root], run.root, REPORT_LOOK_S)


def report_sweep(
    listing: Path, drawings: Sequence[AutoDraw], console: Console, *, trained: bool = True
) -> None:
    """Write the report and the picture of several runs beside their list, unless drawing is off for all of them.

    Evaluations have figures of their own, so runs that are not `trained` get no picture.
    """
    if len(drawings) < 2 or set(drawings) == {AutoDraw.nothing}:
        return
    page = listing.with_suffix(".html")
    with _report_failure(
        f"{page.name} was not written; quantexp report {for_shell(listing)}", console
    ):
        from quantexp.analysis.report.write import write_report

        write_report([listing], page, REPORT_LOOK_S * len(drawings))
        console.print(f"[bold]report[/]  {escape(str(short_path(page)))}", soft_wrap=True)
    if not trained:
        return
    picture = listing.with_suffix(".png")
    with _report_failure(
        f"{picture.name} was not drawn; quantexp draw {for_shell(listing)}", console
    ):
        draw_sweep(listing, picture)
        console.print(f"[bold]picture[/] {escape(str(short_path(picture)))}", soft_wrap=True)


def draw_sweep(listing: Path, out: Path) -> Path:
    """Draw the runs of a sweep's list to a PNG, from the stored results of each run.

    Raises:
        CaptureError: none of its runs has a folder yet.
        RunError: a list, or a run's configuration, that cannot be read.
    """
    from quantexp.analysis.draw.source import open_sources
    from quantexp.analysis.measures.table import MeasuresTable
    from quantexp.analysis.quick.first_look import first_look
    from quantexp.analysis.quick.overview import draw_overview
    from quantexp.analysis.quick.scheme_table import schemes_of
    from quantexp.analysis.style import save_png

    sources = open_sources([str(listing)], {})
    tables = [MeasuresTable(source.run.figures) for source in sources if source.run is not None]
    looks = [first_look(s.capture, table) for s, table in zip(sources, tables, strict=True)]
    return save_png(draw_overview(*schemes_of(sources, looks)).figure, out)


@contextmanager
def _report_failure(words: str, console: Console) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001  (whatever it is, the runs are over)
        if not isinstance(error, QuantexpError):
            traceback.print_exc(file=sys.stderr)
        console.print(f"[red]{escape(words)}[/]: {escape(str(error))}", soft_wrap=True)


def main(argv: Sequence[str]) -> None:
    """Serve a rank: for each word on standard input, `figures` or `report`, a line of JSON on standard output.

    The line is null, or the failure: its reason in one line, and its traceback. What a library prints goes to standard
    error.
    """
    end_with_parent(None)
    run, drawing = RunDir(Path(argv[0])), AutoDraw(argv[1])
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with suppress(Exception):  # the request that needs it meets it, and reports it
        import_module("quantexp.analysis.quick.picture")
        import_module("quantexp.analysis.report.write")
    for what in sys.stdin:
        failure = None
        try:
            if what.strip() == "figures":
                draw_figures(run, drawing)
            else:
                from quantexp.analysis.report.write import write_report

                write_report([run.root], run.root, REPORT_LOOK_S)
        except Exception as error:  # noqa: BLE001  (the rank reports it)
            failure = first_line(error), traceback.format_exc().rstrip()
        answers.write(f"{json.dumps(failure)}\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
