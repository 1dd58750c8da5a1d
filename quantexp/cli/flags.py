"""The arguments and flags of each verb of the command line, and the words that they may have. Needs no torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

#: The keys that select captured tensors.
FILTERS = ("layer=", "rank=", "iteration=", "operation=", "tensor=", "module=")
SHELLS = ("bash", "zsh", "fish")
#: What can be listed -> the configuration group; None for what is no group.
KINDS: dict[str, str | None] = {
    "models": "model",
    "datasets": "dataset",
    "schemes": "quant",
    "formats": "format",
    "presets": "training",
    "captures": "capture",
    "launchers": "launcher",
    "layouts": "parallel",
    "sizes": "size",
    "experiments": "experiment",
    "runs": None,
}


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add the words of a verb that composes an experiment."""
    about = "choices (group=choice) and values (key=value)"
    parser.add_argument("words", nargs="*", metavar="key=value", help=about)
    add_config_dir(parser)


def add_config_dir(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the user's own folder of configuration files."""
    about = "a folder with YAML files of your own, laid out as conf/"
    parser.add_argument("-cd", "--config-dir", type=Path, metavar="FOLDER", help=about)


def _multirun(parser: argparse.ArgumentParser) -> None:
    about = "a sweep over several values: a=x,y 'quant=glob(*)'"
    parser.add_argument("-m", "--multirun", action="store_true", help=about)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_train(parser: argparse.ArgumentParser) -> None:
    """Add what composes experiments: overrides, and the flags for a folder and a sweep."""
    add_overrides(parser)
    _multirun(parser)


def _plan(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    _multirun(parser)
    parser.add_argument("--maps", action="store_true", help="of a sweep the precision maps too")
    add_json(parser)


def _list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="KIND", help=f"one of {', '.join(KINDS)}")
    add_config_dir(parser)
    add_json(parser)


def _words(nargs: str, metavar: str, about: str) -> Callable[[argparse.ArgumentParser], None]:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("words", nargs=nargs, metavar=metavar, help=about)

    return add


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add the words of a verb about any runs."""
    about = "a folder of runs (./runs), a run or a part of its name, a sweep's list, a submission"
    _words("*", "DIR", about)(parser)


def _status(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    parser.add_argument("--watch", action="store_true", help="go on until all have ended")
    add_json(parser)


def _logs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="RUN", help="a run, or a part of its name")
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="the process (default 0)")
    parser.add_argument("-f", "--follow", action="store_true", help="until the run has ended")


def _captures(parser: argparse.ArgumentParser) -> None:
    about = "a run, a part of its name, or a folder of captured tensors"
    parser.add_argument("folder", metavar="DIR", help=about)
    parser.add_argument("words", nargs="*", metavar="key=pattern", help="only those: tensor=grad_*")
    parser.add_argument("--list", action="store_true", help="a row for each tensor")
    parser.add_argument("--check", action="store_true", help="compare every file with its hash")
    parser.add_argument("--export", type=Path, metavar="FOLDER", help="copy the tensors there")
    about = "as what --export writes them (default pt)"
    parser.add_argument("--to", choices=("pt", "safetensors", "npz"), default="pt", help=about)
    add_json(parser)


_SIDES = "runs, parts of their names, a sweep's list, a folder of runs"


def _compare(parser: argparse.ArgumentParser) -> None:
    _words("+", "RUN", _SIDES)(parser)
    add_json(parser)


#: Adds the arguments and flags of a verb to its parser, unless the verb has its own.
FLAGS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "train": add_train,
    "plan": _plan,
    "list": _list,
    "status": _status,
    "logs": _logs,
    "resume": add_runs,
    "retry": add_runs,
    "cancel": add_runs,
    "compare": _compare,
    "report": _words("+", "DIR", _SIDES),
    "captures": _captures,
    "export": _words("+", "RUN", "a run, or a part of its name"),
    "doctor": add_json,
    "completion": _words("*", "SHELL", f"one of {', '.join(SHELLS)}"),
    "help": _words("*", "VERB", "the verb; none: all verbs"),
}
