"""The verb `requantise`: its arguments and their defaults. Needs no torch."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from pathlib import Path

from quantexp.cli.flags import FILTERS, add_config_dir, add_json
from quantexp.errors import ConfigError
from quantexp.extra import Verb
from quantexp.folders import user_path

#: The SQNR of E5M2 for normally distributed values (25.4 to 25.6 dB, see docs/formats.md), the format of gradients in
#: published FP8 training (arXiv 2209.05433): noise of 0.3 % of the signal's power.
SQNR_DB = 25.0
#: The number of sampled elements of each operand: 2048 blocks of 32.
NUM_ELEMENTS = 1 << 16
_USAGE = (
    "[--formats A,B] [--sqnr DB] [--elements N] [--out FOLDER] [--jobs N] [--json] DIR "
    "[key=pattern ...] [paths.root=FOLDER] [launcher=slurm launcher.key=value ...]"
)


@dataclass(frozen=True)
class Request:
    """The request of a `requantise` command."""

    folder: str
    #: `key=pattern` filters of tensors.
    words: list[str]
    #: Comma-separated names; None means all.
    formats: str | None = None
    sqnr_db: float = SQNR_DB
    #: The number of sampled elements of each operand; 0 means all.
    num_elements: int = NUM_ELEMENTS
    #: The number of files processed in parallel; None means one for each core.
    jobs: int | None = None
    out: Path | None = None
    #: The definitions of the formats that files of the user declare, as JSON by name.
    definitions: dict[str, str] = field(default_factory=dict)

    @property
    def output(self) -> Path:
        """The output folder."""
        return self.out if self.out is not None else user_path(self.folder) / "requantise"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb to a parser."""
    about = "a run, a part of its name, or a folder of captured tensors"
    parser.add_argument("folder", metavar="DIR", help=about)
    parser.add_argument("words", nargs="*", metavar="key=pattern", help="only those: layer=0")
    parser.add_argument("--formats", metavar="A,B", help="number formats (default: all)")
    about = f"what every recommended slot keeps (default {SQNR_DB:g})"
    parser.add_argument("--sqnr", type=float, default=SQNR_DB, metavar="DB", help=about)
    about = f"of each operand, in whole blocks; 0 is all (default {NUM_ELEMENTS})"
    parser.add_argument("--elements", type=int, default=NUM_ELEMENTS, metavar="N", help=about)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: DIR/requantise")
    parser.add_argument("--jobs", type=int, metavar="N", help="files at a time (default: cores)")
    add_config_dir(parser)
    add_json(parser)


def words_of(request: Request) -> list[str]:
    """The words of the command line that are parsed to this request; its definitions need `--config-dir` too."""
    values = {
        "--elements": request.num_elements,
        "--formats": request.formats,
        "--jobs": request.jobs,
        "--out": request.out,
    }
    options = [
        word for name, value in values.items() if value is not None for word in (name, str(value))
    ]
    return [request.folder, *request.words, "--sqnr", repr(request.sqnr_db), *options]


def request_of(arguments: argparse.Namespace, definitions: dict[str, str] | None = None) -> Request:
    """The request of the parsed arguments, with the definitions of the user's own formats.

    Raises:
        ConfigError: a number out of range.
    """
    if arguments.elements < 0:
        raise ConfigError(f"--elements must be at least 0 (0 is all), got {arguments.elements}")
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ConfigError(f"--jobs must be at least 1, got {arguments.jobs}")
    if not math.isfinite(arguments.sqnr):
        raise ConfigError(f"--sqnr must be a finite number of dB, got {arguments.sqnr}")
    return Request(
        arguments.folder,
        arguments.words,
        arguments.formats,
        arguments.sqnr,
        arguments.elements,
        arguments.jobs,
        arguments.out,
        definitions or {},
    )


REQUANTISE = Verb(
    "score a capture under every format and recommend a scheme",
    _USAGE,
    (
        "requantise bf16-1a2b3c4d",
        "requantise bf16 --formats mxfp8,hifp8 layer=0",
        "requantise bf16 launcher=slurm launcher.max_parallel=8",
    ),
    module="quantexp.extras.requantise.verb",
    add_arguments=add_arguments,
    words=(*FILTERS, "paths.root="),
    takes_runs=True,
)
