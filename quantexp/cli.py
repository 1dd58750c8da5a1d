"""The command line: `quantexp [verb] [flags] group=choice key=value ...`.

The verb is the first argument if it is one of VERBS, else train. Exit codes: 0 done, 1 the user's error or a failed
run (one line on standard error), 2 misuse of the command line, 130 interrupted. `--help` and `list` import no
torch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from quantexp import __version__
from quantexp.errors import QuantexpError

if TYPE_CHECKING:
    from quantexp.schema import Experiment

VERBS = {
    "train": "run an experiment (the verb may be left out)",
    "plan": "show what would run: precision map, memory, bytes, commands; run nothing",
    "list": "list models, datasets, schemes, presets, captures, or runs",
    "doctor": "check what this machine can run",
}

#: Columns of what is not read on a terminal, so that no name in a table is cut.
PIPE_WIDTH = 160

EXAMPLES = """\
examples:
  quantexp model=llama32-1b dataset=wikipedia quant=FA_linear_mxfp8 training=fast
  quantexp -m model=llama32-1b dataset=wikipedia 'quant=glob(*)' training=fast
  quantexp quant=FA_mxfp8 quant/pv=hifp8 training=fast
  quantexp plan quant=FA_linear_mxfp4 --json
  quantexp list schemes
"""


def main(argv: list[str] | None = None) -> int:
    """The console script; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    verb = words.pop(0) if words and words[0] in VERBS else "train"
    arguments = _parser(verb).parse_intermixed_args(words)
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, _interrupt)
    try:
        return _COMMANDS[verb](arguments)
    except QuantexpError as error:
        _complain(str(error))
        return 1
    except KeyboardInterrupt:
        _complain("interrupted")
        return 130


def _interrupt(signum: int, frame: object) -> None:
    """An end asked for in another way than Ctrl-C: the worker is ended too."""
    raise KeyboardInterrupt


def _parser(verb: str) -> argparse.ArgumentParser:
    verbs = "\n".join(f"  {name:8} {about}" for name, about in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="quantexp" if verb == "train" else f"quantexp {verb}",
        usage=f"quantexp [{'|'.join(VERBS)}] [flags] group=choice key=value ...",
        description=f"Quantised training experiments that prove what ran.\n\nverbs:\n{verbs}",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words", nargs="*", metavar="key=value", help="choices and overrides (Hydra)"
    )
    parser.add_argument(
        "-cd",
        "--config-dir",
        type=Path,
        help="a folder with YAML files of your own, laid out as conf/",
    )
    parser.add_argument("--version", action="version", version=f"quantexp {__version__}")
    if verb in ("train", "plan"):
        parser.add_argument(
            "-m",
            "--multirun",
            action="store_true",
            help="a sweep over choices: a=x,y 'quant=glob(*)'",
        )
    if verb in ("plan", "list", "doctor"):
        parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _train(arguments: argparse.Namespace) -> int:
    _check_overrides(arguments.words)
    if arguments.multirun:
        from quantexp.sweep import run_sweep

        return run_sweep(arguments.words, arguments.config_dir, _console())
    from quantexp.compose import compose
    from quantexp.execute import execute
    from quantexp.status import State
    from quantexp.summary import print_outcome

    experiment = compose(arguments.words, arguments.config_dir)
    if experiment.dry_run:
        return _show_plans([experiment], as_json=False)
    outcome = execute(experiment, _console())
    if outcome.state is State.COMPLETED:
        print_outcome(outcome, _console())
        return 0
    _complain(f"{outcome.run.root.name} {outcome.state.value}: {outcome.reason}")
    return 130 if outcome.state is State.CANCELLED else 1


def _plan(arguments: argparse.Namespace) -> int:
    _check_overrides(arguments.words)
    from quantexp.compose import compose, compose_sweep

    if arguments.multirun:
        return _show_plans(
            compose_sweep(arguments.words, arguments.config_dir), arguments.json, True
        )
    return _show_plans([compose(arguments.words, arguments.config_dir)], arguments.json)


def _show_plans(experiments: list[Experiment], as_json: bool, is_sweep: bool = False) -> int:
    from quantexp.plan import make_plan, plan_json, print_plan

    plans = [make_plan(experiment) for experiment in experiments]
    if as_json:
        content = [plan_json(plan) for plan in plans]
        _print_json(content if is_sweep else content[0])
    else:
        for plan in plans:
            print_plan(plan, _console())
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from quantexp.listing import listing, print_listing
    from quantexp.schema import PathsConfig

    given = [word for word in arguments.words if word.startswith("paths.root=")]
    root = Path(given[-1].split("=", 1)[1] if given else PathsConfig().root).expanduser().absolute()
    kinds = [word for word in arguments.words if word not in given]
    content = listing(kinds, arguments.config_dir, root)
    if arguments.json:
        _print_json(content)
    else:
        print_listing(content, _console())
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from quantexp.doctor import checks, doctor_json, print_doctor

    if arguments.words:
        _parser("doctor").error(f"doctor takes no overrides, got {' '.join(arguments.words)}")
    found = checks()
    if arguments.json:
        _print_json(doctor_json(found))
    else:
        print_doctor(found, _console())
    return 0 if doctor_json(found)["ok"] else 1


def _check_overrides(words: list[str]) -> None:
    """Misuse of the command line: a word that is neither a verb nor an override."""
    for word in words:
        if "=" not in word and not word.startswith("~"):
            _parser("train").error(
                f"{word!r} is neither a verb ({', '.join(VERBS)}) nor key=value; see quantexp --help"
            )


def _complain(message: str) -> None:
    sys.stderr.write(f"quantexp: {message}\n")


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    return console


def _print_json(content: object) -> None:
    sys.stdout.write(json.dumps(content, indent=1) + "\n")


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "train": _train,
    "plan": _plan,
    "list": _list,
    "doctor": _doctor,
}


if __name__ == "__main__":
    sys.exit(main())
