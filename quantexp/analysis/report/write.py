"""Writes report.html: one or several runs in one file.

The page's policy (Content-Security-Policy) allows its own style sheet and script, by their hashes, and images inside
the file; nothing can be loaded from anywhere, and no other script runs, whatever a run folder holds.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from quantexp import __version__
from quantexp.analysis.compare.arguments import Runs, named_runs
from quantexp.analysis.compare.comparison import Comparison, Row, compare
from quantexp.analysis.compare.lines import Line, lines_of
from quantexp.analysis.compare.side import read_side
from quantexp.analysis.compare.verdicts import judge
from quantexp.analysis.report.cells import MAX_CELLS, Numerics, numerics
from quantexp.analysis.report.facts import Facts, Origin, facts, origin, shared
from quantexp.analysis.report.judged import Deadline
from quantexp.analysis.report.parts import embedded, page_text, policy
from quantexp.analysis.report.proof import Proof, proof
from quantexp.analysis.report.series import series
from quantexp.analysis.scheme_style import SchemeStyle
from quantexp.analysis.tree import FILTERED, QUICK
from quantexp.errors import RunError, UnreadableError
from quantexp.extra import Service, service
from quantexp.folders import user_path
from quantexp.reading.files import read_bytes
from quantexp.runs.disk import write_whole
from quantexp.runs.evaluation import is_evaluation
from quantexp.runs.find import Missing
from quantexp.runs.paths import RunDir
from quantexp.runs.status import now
from quantexp.terminal.escaping import printable

FILE_NAME = "report.html"
#: Maximum bytes of the PNG files of all runs of a report; base64 adds a third.
MAX_BYTES = 3_000_000
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_FIRST = f"{QUICK}.png"
#: Of some of the tensors.
_NOT_SHOWN = f"{QUICK}{FILTERED}.png"
#: About gaps between evaluations without training.
_EVALUATED = (
    "Of the same weights on the same tokens; the intervals over documents are in each overview"
)
_SCRIPTS = (
    *("svg.js", "losses.js", "colours.js", "detail.js"),
    *("map.js", "heatmap.js", "page.js"),
)


def write_report(sources: Sequence[Path], out: Path, look_s: float | None = None) -> Path:
    """Write the report of runs, sweeps' lists or folders of runs; returns the file.

    Args:
        sources: what there is to report on; several runs become one report that compares them.
        out: the file, if it ends in .html, else a folder for `report.html`.
        look_s: seconds to spend on values whose statistics were not captured; None is as long as it takes.

    Raises:
        RunError: no such run, or a file that cannot be written.
    """
    scopes = [named_runs([str(user_path(source).absolute())], source.parent) for source in sources]
    runs = tuple(dict.fromkeys(run for each in scopes for run in each.runs))
    missing = tuple(gone for each in scopes for gone in each.missing)
    return write_page(Runs(runs, missing), out, look_s)


def write_page(named: Runs, out: Path, look_s: float | None = None) -> Path:
    """`write_report` for resolved runs.

    Raises:
        RunError: as `write_report` does.
    """
    file = out if out.suffix == ".html" else out / FILE_NAME
    page = render(named.runs, named.missing, look_s)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, page)
    except OSError as error:
        raise RunError(
            f"the report cannot be written to {file}: {error.strerror}; give out=PATH elsewhere"
        ) from error
    return file


def render(
    runs: Sequence[RunDir], missing: Sequence[Missing] = (), look_s: float | None = None
) -> str:
    """The page.

    Raises:
        RunError: there is no run.
    """
    sides = [read_side(run) for run in runs]
    comparison = compare(sides, missing, is_compared=len(sides) > 1)
    deadline = Deadline(look_s)
    max_cells = max(1, MAX_CELLS // len(runs))
    cells = [
        numerics(run, row.side.names.capture_dir, max_cells, deadline)
        for run, row in zip(runs, comparison.rows, strict=True)
    ]
    lines = lines_of(comparison)
    styles = {row: line.style for line in lines for row in line.rows}
    in_order = [styles[i] for i in range(len(runs))]
    shown = zip(comparison.rows, in_order, cells, pictures(runs), strict=True)
    page = _page(comparison, lines, [part(*each) for each in shown])
    # Shipped scripts and styles are ASCII, so they are the same in any encoding.
    return page.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _page(comparison: Comparison, lines: Sequence[Line], parts: Sequence[Part]) -> str:
    verdicts = judge(comparison)
    style, script = page_text("page.css"), page_text(*_SCRIPTS)
    environment = Environment(
        loader=PackageLoader("quantexp.analysis.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    return environment.get_template("page.html").render(
        title=_title(parts),
        policy=policy(style, script),
        style=Markup(style),
        script=Markup(script),
        data=embedded(
            {"series": series(lines), "numerics": [asdict(one.numerics) for one in parts]}
        ),
        shared=shared([one.facts for one in parts]),
        comparison=comparison,
        verdicts=verdicts,
        noise=_EVALUATED
        if parts[0].evaluates
        else f"{verdicts.noise[:1].upper()}{verdicts.noise[1:]}",
        parts=parts,
        is_sweep=len(parts) > 1,
        version=__version__,
        written=now()[:19].replace("T", " ") + " UTC",
    )


def _shown(value: object) -> object:
    """A value as the page shows it."""
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return printable(value) if is_text else value  # type: ignore[arg-type]


def _title(parts: Sequence[Part]) -> str:
    if len(parts) == 1:
        return parts[0].row.side.run.root.name
    models = dict.fromkeys(str(one.row.side.names.model) for one in parts)
    return f"{len(parts)} runs of {', '.join(models)}"


@dataclass
class Pictures:
    """The figures of one run."""

    #: Name in the run's `figures/`, and the content in base64.
    shown: list[tuple[str, str]] = field(default_factory=list)
    #: Names of figures that are not embedded.
    left_out: list[str] = field(default_factory=list)


def pictures(runs: Sequence[RunDir], max_bytes: int = MAX_BYTES) -> list[Pictures]:
    """The figures of each run, interleaved up to the limit, with the overview of every run first."""
    embedded = [Pictures() for _ in runs]
    room = max_bytes
    for name, i, path in _in_turn(runs):
        size = path.stat().st_size
        content = path.read_bytes() if size <= room else b""
        if content.startswith(_SIGNATURE):
            room -= size
            embedded[i].shown.append((name, base64.b64encode(content).decode()))
        else:
            embedded[i].left_out.append(name)
    return embedded


def _in_turn(runs: Sequence[RunDir]) -> Iterator[tuple[str, int, Path]]:
    """Each run's overview, then each run's second figure, and so on."""
    listed = [_from_each_folder(_files(run)) for run in runs]
    for turn in range(max(map(len, listed), default=0)):
        for i, files in enumerate(listed):
            if turn < len(files):
                yield files[turn][0], i, files[turn][1]


def _from_each_folder(files: Iterable[tuple[str, Path]]) -> list[tuple[str, Path]]:
    """The overview, then the first figure of each folder, then the second of each, so that every kind is included.

    Of as many as are equally good the smallest come first: a map of 32 heads has the room of five other figures.
    """
    places: Counter[Path] = Counter()
    ranked = []
    for name, path in sorted(files):
        ranked.append((name != _FIRST, places[path.parent], path.stat().st_size, name, path))
        places[path.parent] += 1
    return [(name, path) for *_, name, path in sorted(ranked)]


def _files(run: RunDir) -> Iterator[tuple[str, Path]]:
    """PNG files below the run's figures: none that a link leads to elsewhere, and no overview of filtered tensors."""
    inside = run.figures.resolve()
    for path in run.figures.rglob("*.png"):
        if path == run.figures / _NOT_SHOWN:
            continue
        if path.is_file() and path.resolve().is_relative_to(inside):
            yield str(path.relative_to(run.figures)), path


#: Maximum shown characters of config.yaml.
MAX_CONFIG = 60_000


def _config(file: Path) -> str:
    """The text of config.yaml; empty if there is none, or if the comparison says why it cannot be read."""
    try:
        return read_bytes(file).decode(errors="replace")
    except (FileNotFoundError, UnreadableError):
        return ""


@dataclass(frozen=True)
class Part:
    """One run in the report."""

    row: Row
    style: SchemeStyle
    #: Whether the run evaluates without training.
    evaluates: bool
    #: Heading -> value of the overview.
    facts: Facts
    proof: Proof
    origin: Origin
    config: str
    numerics: Numerics
    pictures: Pictures
    #: As `page/dossiers.html` shows them.
    dossiers: list[Any]


def part(row: Row, style: SchemeStyle, cells: Numerics, pictures: Pictures) -> Part:
    """A run's part of the report."""
    side = row.side
    maps = side.maps
    shown = proof(side.precision, maps[min(maps)] if maps else [], side.names.precision)
    came_from = origin(side.provenance)
    config = side.run.config
    text = _config(config)
    shown_dossiers = service(Service.SHOWN_DOSSIERS)
    return Part(
        row,
        style,
        is_evaluation(side.run),
        facts(side, shown, came_from),
        shown,
        came_from,
        text if len(text) <= MAX_CONFIG else text[:MAX_CONFIG] + "\n# cut here",
        cells,
        pictures,
        [] if shown_dossiers is None else shown_dossiers(side.run),
    )
