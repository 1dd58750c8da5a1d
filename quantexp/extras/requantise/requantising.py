"""`quantexp requantise DIR [key=pattern ...]`: scores a capture under every format, and recommends a scheme.

Writes `requantise.csv`, `requantise.json`, `scale_exponent.{csv,png,svg}` and `quant/recommended.yaml`, and prints the
table. Files that cannot be read are named; the rest goes on, and the exit code is 1 at the end.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from quantexp.analysis.chapter import progress_bar
from quantexp.analysis.draw.source import foreign_files
from quantexp.analysis.scheme_yaml import scheme_path
from quantexp.analysis.tensors.run_record import read_names
from quantexp.capture.inspect import selected
from quantexp.capture.reader import Capture
from quantexp.errors import CaptureError, RunError
from quantexp.extras.requantise.arguments import Request
from quantexp.extras.requantise.candidates import candidates, formats_of
from quantexp.extras.requantise.exponent import study_points
from quantexp.extras.requantise.exponent_figure import draw_study, write_study
from quantexp.extras.requantise.files import (
    ScoresFile,
    outcome_json,
    study_text,
    write_text,
)
from quantexp.extras.requantise.passing import Work, operands_of, passed
from quantexp.extras.requantise.recommend import NAME, Choice, recommend, scheme_text
from quantexp.extras.requantise.table import print_table
from quantexp.extras.requantise.tally import Tally
from quantexp.folders import for_shell, user_path, writing_into
from quantexp.formats import Family, Format
from quantexp.formats.definitions.definition import declared_format
from quantexp.processes.machine import num_cores
from quantexp.quant.label import is_unquantised
from quantexp.runs.paths import RunDir
from quantexp.terminal.facts import Facts

#: Maximum printed notes.
_NOTES = 5
#: Quantisation types without quantisation, or without information.
_UNQUANTISED = frozenset({"bf16", "none", "None"})


@dataclass(frozen=True)
class Outcome:
    """The result of a `requantise`."""

    tally: Tally
    choices: list[Choice]
    formats: list[Format]
    #: The output folder.
    folder: Path
    sqnr_db: float
    #: `requantise.json`.
    content: dict[str, Any]

    def print(self, console: Console) -> None:
        """Print the table and the recommendation."""
        print_table(self.tally, self.choices, self.formats, console)
        quantised = sum(one.candidate is not None for one in self.choices)
        mean = sum(one.bits for one in self.choices) / len(self.choices)
        more = len(self.tally.notes) - _NOTES
        extent = _extent(self.tally.work)
        facts = Facts(console)
        for note in self.tally.notes[:_NOTES]:
            facts.add_row("note", escape(note))
        if more > 0:
            facts.add_row("", f"... and {more} more notes in requantise.json")
        count = self.tally.num_files
        facts.add_row("scored", f"{count} file{'s' * (count != 1)}, {extent}")
        facts.add_row(
            "recommended",
            f"at {self.sqnr_db:g} dB: {quantised} of {len(self.choices)} slots quantised, {mean:.2f} bits an element "
            "in the mean of the slots",
        )
        folder = for_shell(self.folder)
        facts.add_line("train with", f"quantexp --config-dir {folder} quant={NAME} ...")
        facts.print()

    def exit_code(self, complain: Callable[[str], None]) -> int:
        """0, or 1 with a message about the number of unusable files."""
        if problems := len(self.tally.problems):
            complain(f"{problems} files could not be used, they are named above")
        return 1 if problems else 0


def requantise(request: Request, progress: Console, complain: Callable[[str], None]) -> Outcome:
    """Score, recommend and write; reports each unusable file.

    Raises:
        CaptureError: nothing captured, selected, with values, an operand, or readable; a folder that cannot be
            written.
        ConfigError: an unknown format.
    """
    formats = _formats(request)
    capture = selected(request.folder, request.words)
    for words in capture.damage:
        complain(f"{words}: left out")
    files = _operands(capture, request)
    folder = request.output
    tally = Tally(work_on(request))
    with writing_into(folder, CaptureError, "--out"):
        folder.mkdir(parents=True, exist_ok=True)
        _score(files, tally, folder, request.jobs or num_cores(), progress)
    tally.problems += foreign_files(request.folder, capture.folder)
    tally.notes[:0] = _trajectory_note(capture)
    for file, why in tally.problems:
        complain(why if file in why else f"{file}: {why}")
    if not tally.worst:
        why = tally.notes[0] if tally.notes else "see above"
        raise CaptureError(f"{capture.folder}: none of {len(files)} files could be scored: {why}")
    choices = recommend(tally, request.sqnr_db)
    content = outcome_json(tally, choices, capture.folder, request.sqnr_db)
    with writing_into(folder, CaptureError, "--out"):
        _write(tally, choices, content, folder)
    return Outcome(tally, choices, formats, folder, request.sqnr_db, content)


def output_of(request: Request) -> Path:
    """The output folder of a request whose tensors can be scored.

    Raises:
        CaptureError: nothing captured, selected, with values, or an operand.
        ConfigError: an unknown format.
    """
    work_on(request)
    _operands(selected(request.folder, request.words), request)
    return user_path(request.output).absolute()


def work_on(request: Request) -> Work:
    """What a request does with every file.

    Raises:
        ConfigError: an unknown format.
    """
    formats = _formats(request)
    is_whole = any(fmt.family is Family.PYTHON for fmt in formats)  # such a class gets the tensor
    num_elements = 0 if is_whole else request.num_elements
    return Work(candidates(formats), study_points(formats), num_elements)


def _formats(request: Request) -> list[Format]:
    declared = {
        name: declared_format(name, json.loads(definition))
        for name, definition in request.definitions.items()
    }
    return formats_of(None if request.formats is None else request.formats.split(","), declared)


def _operands(capture: Capture, request: Request) -> Capture:
    where = " ".join([str(capture.folder), *request.words])
    if not len(capture):
        raise CaptureError(
            f"{where}: no captured tensor fits; `quantexp captures` lists what there is"
        )
    if not len(capture.with_values()):
        raise CaptureError(
            f"{where}: only statistics were kept, no values to quantise; run with capture=tensors"
        )
    files = operands_of(capture)
    if not len(files):
        raise CaptureError(
            f"{where}: none of these tensors is an operand of a matrix product; those are input, weight, grad_output, "
            "query, key, value, attn_weights and exp_scores"
        )
    return files


def _score(files: Capture, tally: Tally, folder: Path, jobs: int, progress: Console) -> None:
    with (
        ScoresFile(folder / "requantise.csv", tally.work.candidates) as rows,
        progress_bar("requantising", len(files), progress, "files") as advance,
        contextlib.closing(passed(files, tally.work, jobs)) as every,
    ):
        for scores in every:
            tally.add(scores)
            rows.add(scores)
            advance()


def _write(tally: Tally, choices: list[Choice], content: dict[str, Any], folder: Path) -> None:
    write_text(folder / "requantise.json", json.dumps(content, indent=1) + "\n")
    write_text(folder / "scale_exponent.csv", study_text(tally))
    write_text(scheme_path(folder, NAME), scheme_text(choices, content["sqnr_db"]))
    if tally.work.points:
        write_study(draw_study(tally), folder)
    else:
        for suffix in (".png", ".svg"):  # of an earlier call
            (folder / f"scale_exponent{suffix}").unlink(missing_ok=True)


def _extent(work: Work) -> str:
    if not work.num_elements:
        return "all elements"
    extent = f"{work.num_elements} elements of each operand at most"
    return f"{extent}, weights whole" if work.has_rows else extent


def _trajectory_note(capture: Capture) -> list[str]:
    """A note that names the scheme of a quantised capture; none for a capture in the working precision.

    Values are those before quantisation all the same, but of a training that quantisation has led elsewhere. The scheme
    is the run's; where there is no run, the quantisation types that the tensors name.
    """
    types = sorted({str(e.metadata.get("quant_type")) for e in capture} - _UNQUANTISED)
    scheme = _scheme_of(capture.folder)
    if (scheme and is_unquantised(scheme)) or not (scheme or types):
        return []
    under = scheme or ", ".join(types)
    what = "values are those before quantisation, but of a training that was quantised"
    return [f"captured under {under}: {what}"]


def _scheme_of(folder: Path) -> str | None:
    """The scheme of the capture's run; None if the folder is not in a run."""
    try:
        return read_names(RunDir(folder.resolve().parent)).scheme
    except RunError:
        return None
