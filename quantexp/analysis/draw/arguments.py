"""Parses the command line of `draw`: folders, filters, output folder and formats. Needs no torch.

Filters are flags or words, `--layer 0-3` or `layer=0-3`; numbers take lists and ranges (`0,4-7`), names take lists and
shell patterns (`grad_*,weight`).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quantexp.errors import CaptureError, ConfigError
from quantexp.folders import user_path

#: File formats of figures.
FORMATS = ("png", "pdf", "svg")
#: Filters whose values are numbers.
NUMBERS = ("layer", "rank", "iteration")
USAGE = (
    "quantexp draw [--layer 0,4-7] [--rank N] [--iteration N] [--type mxfp8,attention] [--operation forward]\n"
    "                     [--tensor 'grad_*'] [--module fc1] [--only CHAPTER,..] [--formats png,pdf] [--jobs N]\n"
    "                     [--force] DIR... [out=FOLDER] [paths.root=FOLDER] [launcher=slurm launcher.key=value ...]"
)

_ABOUT = {
    "layer": "only these layers, from 0: 0,4-7",
    "rank": "only these ranks",
    "iteration": "only these iterations: 1,100-200",
    "type": "only these quantisation types (mxfp8) or layer types (attention, linear, residual)",
    "operation": "forward or backward",
    "tensor": "only these tensors: query,'grad_*'",
    "module": "only these modules: qkv,fc1",
}


@dataclass(frozen=True)
class Request:
    """The request of a `draw` command."""

    folders: list[str]
    #: Filter -> its text on the command line.
    filters: Mapping[str, str] = field(default_factory=dict)
    out: Path | None = None
    formats: tuple[str, ...] = ("png",)
    #: The parts of the tree; None means all.
    only: tuple[str, ...] | None = None
    #: Draw again even if an earlier draw has finished it.
    force: bool = False
    #: The number of worker processes; None means one for each core.
    jobs: int | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb to a parser."""
    about = "a run, a part of its name, a capture folder, a folder of runs, runs/sweeps/NAME.json; out=FOLDER"
    parser.add_argument("words", nargs="+", metavar="DIR", help=about)
    for name, words in _ABOUT.items():
        parser.add_argument(f"--{name}", metavar="A,B", help=words)
    parser.add_argument("--out", metavar="FOLDER", help="default: RUN/figures, or DIR/figures")
    parser.add_argument("--only", metavar="A,B", help="only these parts: distributions,heatmaps")
    about = "how figures are saved: png,pdf,svg (default png)"
    parser.add_argument("--formats", default="png", metavar="A,B", help=about)
    about = "draw again what an earlier draw has finished"
    parser.add_argument("--force", action="store_true", help=about)
    about = "worker processes (default: cores)"
    parser.add_argument("--jobs", type=int, metavar="N", help=about)


def request_of(arguments: argparse.Namespace) -> Request:
    """The request of the parsed arguments.

    Raises:
        ConfigError: no folder, an unknown key or format, a number that is none, or the same thing said twice.
    """
    values = {name: getattr(arguments, name) for name in (*_ABOUT, "out")}
    folders = []
    for word in arguments.words:
        key, equals, value = word.partition("=")
        if not equals or Path(word).exists():
            folders.append(word)
        elif key not in values:
            raise ConfigError(f"{key} must be one of {', '.join(values)}, got {word}")
        elif values[key] is not None:
            raise ConfigError(f"{key} is given twice: {values[key]} and {value}")
        else:
            values[key] = value
    if not folders:
        raise ConfigError("draw takes a DIR: a run, a capture folder, or a folder of runs")
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {arguments.jobs}")
    out = values.pop("out")
    filters = {name: value for name, value in values.items() if value is not None}
    for name in filters.keys() & NUMBERS:
        numbers(name, filters[name])
    return Request(
        folders,
        filters,
        None if out is None else user_path(out),
        _formats(arguments.formats),
        None if arguments.only is None else _parts(arguments.only),
        arguments.force,
        arguments.jobs,
    )


def words_of(request: Request) -> list[str]:
    """The words of the command line that are parsed to this request."""
    words = [f"{name}={value}" for name, value in request.filters.items()]
    words += [] if request.out is None else [f"out={request.out}"]
    words += ["--formats", ",".join(request.formats)]
    words += [] if request.only is None else ["--only", ",".join(request.only)]
    words += ["--force"] if request.force else []
    words += [] if request.jobs is None else ["--jobs", str(request.jobs)]
    return [*request.folders, *words]


def require_folders(folders: Sequence[str]) -> None:
    """Refuse a missing folder before any expensive work.

    Raises:
        CaptureError: the first that is not.
    """
    for folder in folders:
        if not user_path(folder).exists():
            raise CaptureError(
                f"there is no folder {folder}, and no run has that in its name; give a run, a part of its name, or a "
                "folder of captured tensors"
            )


def numbers(name: str, text: str) -> list[range]:
    """Parse `0,4-7` to ranges, ends included.

    Raises:
        ConfigError: anything else.
    """
    parsed = []
    for part in _parts(text):
        match = re.fullmatch(r"(\d+)(?:\s*[-:]\s*(\d+))?", part)
        first, last = (None, None) if match is None else (match[1], match[2] or match[1])
        if first is None or last is None or int(last) < int(first):
            raise ConfigError(f"{name} must be numbers and ranges such as 0,4-7, got {text!r}")
        parsed.append(range(int(first), int(last) + 1))
    return parsed


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _formats(text: str) -> tuple[str, ...]:
    formats = tuple(dict.fromkeys(_parts(text.lower())))
    unknown = [one for one in formats if one not in FORMATS]
    if unknown or not formats:
        raise ConfigError(f"--formats must be of {', '.join(FORMATS)}, got {text!r}")
    return formats
