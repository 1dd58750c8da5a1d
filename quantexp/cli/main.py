"""The command line: `quantexp [flags] [verb] [flags] group=choice key=value ...`.

The verb is the first word that is neither a flag nor a flag's value, if it is one of VERBS; else train. Without any
word the help is shown. Exit codes: 0 done, 1 the user's error or a failed run (one line on standard error), 2 misuse of
the command line, 130 interrupted. `--help` and `list` import no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from quantexp.analysis.draw.arguments import asked as asked_to_draw
from quantexp.analysis.requantise.arguments import asked
from quantexp.cli.arguments import neither_verb_nor_override, parser_of, split_verb, top_parser
from quantexp.cli.verbs import CHANGEABLE, COMPLETE, SHELLS, VERBS
from quantexp.errors import ConfigError, QuantexpError
from quantexp.runs.find import existing_or_named
from quantexp.terminal.close_matches import did_you_mean, near
from quantexp.terminal.console import output_console

if TYPE_CHECKING:
    from quantexp.cli.resume import Wanted
    from quantexp.config.sweep.points import Point
    from quantexp.schema import Experiment


def main(argv: list[str] | None = None) -> int:
    """The console script; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == [COMPLETE]:
        return _complete(given[1:])
    verb, words = split_verb(given)
    if verb is None and set(words) <= {"-h", "--help"}:
        top_parser().parse_args(["--help"])
    verb = verb or "train"
    arguments = parser_of(verb).parse_intermixed_args(words)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _interrupt)
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


def _train(arguments: argparse.Namespace) -> int:
    _check_overrides(arguments.words)
    if arguments.multirun:
        return _train_sweep(arguments)
    from quantexp.config.compose import compose
    from quantexp.schema import LauncherKind

    experiment = compose(arguments.words, arguments.config_dir)
    if experiment.dry_run:
        return _show_plan(experiment, arguments, as_json=False)
    from quantexp.launch.refusal import Request, require_memory

    require_memory([Request(experiment, _quick_test(arguments.words, arguments, os.environ))])
    if experiment.launcher.kind is LauncherKind.slurm:
        from quantexp_launchers.slurm.submit import submit_run

        return submit_run(experiment, output_console())
    if experiment.launcher.detach:
        from quantexp_launchers.local.submit import detach_run

        return detach_run(experiment, output_console())
    return _execute(experiment)


def _train_sweep(arguments: argparse.Namespace) -> int:
    from quantexp.config.sweep.points import compose_points, merged_lines
    from quantexp.schema import LauncherKind

    console = output_console()
    points = compose_points(arguments.words, arguments.config_dir)
    for line in merged_lines(points):
        console.print(line, soft_wrap=True, markup=False)
    if points[0].experiment.dry_run:
        return _show_sweep_plan(points, arguments, as_json=False)
    kinds = {point.experiment.launcher.kind for point in points}
    if len(kinds) > 1:
        raise ConfigError(
            "launcher must be local or slurm for all points of a sweep, got both; run one sweep for each"
        )
    from quantexp.launch.refusal import Request, require_memory

    require_memory([Request(p.experiment, _quick_test(p.overrides, arguments, {})) for p in points])
    if kinds == {LauncherKind.slurm}:
        from quantexp_launchers.slurm.submit import submit_sweep

        return submit_sweep([(point.experiment, point.stage) for point in points], console)
    from quantexp_launchers.local.submit import run_points

    return run_points([(point.experiment, point.stage) for point in points], console)


def _quick_test(
    overrides: list[str], arguments: argparse.Namespace, environment: Mapping[str, str]
) -> Callable[[], Experiment | None]:
    """Composes what the overrides say under `training=fast`, where that makes an experiment."""

    def composed() -> Experiment | None:
        from quantexp.config.compose import compose

        words = [word for word in overrides if not word.startswith("training=")]
        try:
            return compose([*words, "training=fast"], arguments.config_dir, environment)
        except ConfigError:
            return None

    return composed


def _execute(experiment: Experiment) -> int:
    from quantexp_launchers.local.execute import execute

    from quantexp.analysis.after_run import draw_skipped
    from quantexp.launch.summary import print_how_to_go_on, print_outcome
    from quantexp.runs.status import State

    outcome = execute(experiment, output_console())
    if outcome.state is State.COMPLETED:
        if outcome.skipped:
            draw_skipped(outcome.run, experiment.analysis.drawing, output_console())
        print_outcome(outcome, output_console())
        return 0
    _complain(f"{outcome.run.root.name} {outcome.state.value}: {outcome.reason}")
    if outcome.state is State.CANCELLED:
        print_how_to_go_on(outcome.run, output_console())
    return 130 if outcome.state is State.CANCELLED else 1


def _plan(arguments: argparse.Namespace) -> int:
    _check_overrides(arguments.words)
    if arguments.multirun:
        from quantexp.config.sweep.points import compose_points, merged_lines

        points = compose_points(arguments.words, arguments.config_dir)
        for line in merged_lines(points):
            _complain(line)
        return _show_sweep_plan(points, arguments, arguments.json, maps=arguments.maps)
    from quantexp.config.compose import compose

    experiment = compose(arguments.words, arguments.config_dir)
    return _show_plan(experiment, arguments, arguments.json)


def _show_plan(experiment: Experiment, arguments: argparse.Namespace, as_json: bool) -> int:
    from quantexp.cli.plan import make_plan, plan_json, print_plan

    plan = make_plan(experiment, _quick_test(arguments.words, arguments, os.environ))
    if as_json:
        _print_json(plan_json(plan))
    else:
        print_plan(plan, output_console())
    return 0


def _show_sweep_plan(
    points: list[Point], arguments: argparse.Namespace, as_json: bool, maps: bool = False
) -> int:
    from quantexp.cli.plan import make_plan, plan_json
    from quantexp.cli.plan_sweep import print_sweep_plan

    plans = [
        make_plan(point.experiment, _quick_test(point.overrides, arguments, {})) for point in points
    ]
    if as_json:
        _print_json([plan_json(plan) for plan in plans])
    else:
        print_sweep_plan([point.experiment for point in points], plans, output_console(), maps=maps)
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from quantexp.cli.listing import listing, print_listing

    root, kinds = _root_and_rest(arguments.words)
    content = listing(kinds, arguments.config_dir, root)
    if arguments.json:
        _print_json(content)
    else:
        print_listing(content, output_console())
    return 0


def _prepare(arguments: argparse.Namespace) -> int:
    _check_overrides(arguments.words)
    from quantexp.config.compose import compose
    from quantexp.data.prepare.verb import print_prepared, report_json, run_prepare

    prepared = run_prepare(compose(arguments.words, arguments.config_dir), Console(stderr=True))
    if arguments.json:
        _print_json(report_json(prepared.prefix, prepared.card))
    else:
        print_prepared(prepared, output_console())
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from quantexp.cli.doctor import checks, doctor_json, print_doctor

    found = checks()
    if arguments.json:
        _print_json(doctor_json(found))
    else:
        print_doctor(found, output_console())
    return 0 if doctor_json(found)["ok"] else 1


def _verify(arguments: argparse.Namespace) -> int:
    from quantexp.folders import cache_dir
    from quantexp.formats.verify.verb import print_verify, run_verify, verify_json

    given = [word for word in arguments.words if word.startswith("paths.cache=")]
    if given != arguments.words:
        parser_of("verify").error(
            f"verify takes no overrides but paths.cache=FOLDER, got {' '.join(arguments.words)}"
        )
    folder = cache_dir(given[-1].split("=", 1)[1] if given else None)
    found = run_verify(arguments.formats, arguments.device, folder, output_console())
    if arguments.json:
        _print_json(verify_json(found))
    else:
        print_verify(found, output_console())
    if found.mismatches:
        _complain(
            f"verify: {found.mismatches:,} of {found.cases:,} values are not what they should be"
        )
    return 1 if found.mismatches else 0


def _status(arguments: argparse.Namespace) -> int:
    from quantexp.launch.ledger.verbs import show_status, status_json, watch_status

    root, given = _scope("status", arguments.words)
    if arguments.json and arguments.watch:
        parser_of("status").error("--json and --watch exclude each other")
    if arguments.json:
        _print_json(status_json(given, root))
        return 0
    return (watch_status if arguments.watch else show_status)(given, root, output_console())


def _logs(arguments: argparse.Namespace) -> int:
    from quantexp.launch.ledger.verbs import show_logs

    root, given = _scope("logs", arguments.words)
    if given is None:
        parser_of("logs").error("logs takes a run: its folder, or a part of its name")
    return show_logs(given, root, arguments.rank, follow=arguments.follow)


def _cancel(arguments: argparse.Namespace) -> int:
    from quantexp.launch.ledger.verbs import cancel_runs

    root, given = _scope("cancel", arguments.words)
    return cancel_runs(given, root, output_console())


def _captures(arguments: argparse.Namespace) -> int:
    from quantexp.capture import inspect as inspect
    from quantexp.capture import table
    from quantexp.capture.store.report import summary

    _name_folder(arguments)
    capture = inspect.selected(arguments.folder, arguments.words)
    if arguments.check:
        checked = inspect.checked(capture)
        for line in checked.damaged:
            _complain(line)
        if checked.damaged:
            _complain(checked.told())
            return 1
        if not arguments.json:
            output_console().print(checked.told(), soft_wrap=True, markup=False)
    if arguments.export is not None:
        count = inspect.export(capture, arguments.export, arguments.to)
        output_console().print(f"{count} files in {arguments.export}", soft_wrap=True, markup=False)
    elif arguments.json:
        _print_json(capture.rows() if arguments.list else summary(capture))
    else:
        (table.print_list if arguments.list else table.print_summary)(capture, output_console())
    return 0


def _requantise(arguments: argparse.Namespace) -> int:
    from quantexp.analysis.requantise.verb import requantise

    _name_folder(arguments)
    outcome = requantise(asked(arguments), Console(stderr=True), _complain)
    if arguments.json:
        _print_json(outcome.content)
    else:
        outcome.print(output_console())
    if problems := len(outcome.tally.problems):
        _complain(f"{problems} files could not be used, they are named above")
    return 1 if problems else 0


def _draw(arguments: argparse.Namespace) -> int:
    from quantexp.analysis.draw.server import start_server
    from quantexp.analysis.draw.tree import STATISTICS

    root, arguments.words = _root_and_rest(arguments.words)
    wanted = asked_to_draw(arguments)
    wanted = replace(wanted, folders=[existing_or_named(each, root) for each in wanted.folders])
    if wanted.jobs != 1:
        start_server(draws=wanted.only != (STATISTICS,))
    from quantexp.analysis.draw.verb import draw

    outcome = draw(wanted, Console(stderr=True, highlight=False), _complain)
    output_console().print(outcome.words, soft_wrap=True, markup=False)
    if problems := len(outcome.problems):
        several = problems > 1
        _complain(
            f"{problems} file{'s' * several} could not be used, {'they are' if several else 'it is'} named above"
        )
    return 1 if problems else 0


def _compare(arguments: argparse.Namespace) -> int:
    from quantexp.analysis.compare.arguments import named_runs, out_and_rest
    from quantexp.analysis.compare.comparison import compare, record
    from quantexp.analysis.compare.side import read_side

    root, words = _root_and_rest(arguments.words)
    out, words = out_and_rest(words)
    if not words:
        parser_of("compare").error("compare takes runs: RUN ...")
    named = named_runs(words, root)
    compared = compare([read_side(run) for run in named.runs], named.missing)
    if arguments.json:
        _print_json(record(compared))
    else:
        from quantexp.analysis.compare.table import print_comparison

        print_comparison(compared, output_console())
    if out is not None or not arguments.json:
        from quantexp.analysis.compare.curves import draw_curves

        files = draw_curves(compared, out or Path("compare"))
        if not arguments.json:
            written = " ".join(map(str, files))
            output_console().print(f"figure  {written}", soft_wrap=True, markup=False)
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from quantexp.analysis.compare.arguments import out_and_rest
    from quantexp.analysis.report.verb import run_report

    root, words = _root_and_rest(arguments.words)
    out, words = out_and_rest(words)
    if not words:
        parser_of("report").error("report takes runs: DIR ...")
    output_console().print(str(run_report(words, root, out)), soft_wrap=True, markup=False)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from quantexp.cli.export import export

    root, words = _root_and_rest(arguments.words)
    output_console().print(str(export(words, root)), soft_wrap=True, markup=False)
    return 0


def _resume(arguments: argparse.Namespace) -> int:
    from quantexp.cli.resume import interrupted

    return _again("resume", interrupted, arguments.words)


def _retry(arguments: argparse.Namespace) -> int:
    from quantexp.cli.resume import failed

    return _again("retry", failed, arguments.words)


def _again(verb: str, wanted: Wanted, words: list[str]) -> int:
    from quantexp.cli.resume import start_again

    overrides = [word for word in words if word.startswith(CHANGEABLE)]
    root, given = _scope(verb, [word for word in words if word not in overrides])
    return start_again(given, root, wanted, overrides, output_console())


def _scope(verb: str, words: list[str]) -> tuple[Path, str | None]:
    """The folder of runs, and the one DIR that a verb of the ledger takes."""
    root, rest = _root_and_rest(words)
    if len(rest) > 1 or any("=" in word and not Path(word).exists() for word in rest):
        parser_of(verb).error(f"{verb} takes {VERBS[verb].usage}, got {' '.join(words)}")
    return root, rest[0] if rest else None


def _name_folder(arguments: argparse.Namespace) -> None:
    """DIR of a verb that takes one folder may be a part of a run's name, below `paths.root=`."""
    root, arguments.words = _root_and_rest(arguments.words)
    arguments.folder = existing_or_named(arguments.folder, root)


def _root_and_rest(words: list[str]) -> tuple[Path, list[str]]:
    """The folder of runs, as `paths.root=` says or the default, and the other words."""
    from quantexp.schema import PathsConfig

    given = [word for word in words if word.startswith("paths.root=")]
    root = Path(given[-1].split("=", 1)[1] if given else PathsConfig().root)
    return root.expanduser().absolute(), [word for word in words if word not in given]


def _check_overrides(words: list[str]) -> None:
    """Misuse of the command line: a word that is neither a verb nor an override."""
    for word in words:
        if "=" not in word and not word.startswith("~"):
            parser_of("train").error(neither_verb_nor_override(word))


def _help(arguments: argparse.Namespace) -> int:
    for word in arguments.words:
        if word not in VERBS:
            close = did_you_mean(near(word, VERBS))
            parser_of("help").error(f"{word!r} is no verb{close and f'; {close}'}")
        parser_of(word).print_help()
    if not arguments.words:
        top_parser().print_help()
    return 0


def _completion(arguments: argparse.Namespace) -> int:
    from quantexp.cli.completion import script

    if len(arguments.words) != 1 or arguments.words[0] not in SHELLS:
        shells = f"{', '.join(SHELLS[:-1])} or {SHELLS[-1]}"
        given = " ".join(arguments.words) or "nothing"
        parser_of("completion").error(f"completion takes {shells}, got {given}")
    sys.stdout.write(script(arguments.words[0]))
    return 0


def _complete(words: list[str]) -> int:
    from quantexp.cli.completion import candidate_lines

    sys.stdout.write(candidate_lines(" ".join(words)))
    return 0


def _complain(message: str) -> None:
    sys.stderr.write(f"quantexp: {message}\n")


def _print_json(content: object) -> None:
    sys.stdout.write(json.dumps(content, indent=1) + "\n")


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "train": _train,
    "plan": _plan,
    "list": _list,
    "prepare": _prepare,
    "doctor": _doctor,
    "verify": _verify,
    "status": _status,
    "logs": _logs,
    "resume": _resume,
    "retry": _retry,
    "cancel": _cancel,
    "captures": _captures,
    "draw": _draw,
    "requantise": _requantise,
    "compare": _compare,
    "report": _report,
    "export": _export,
    "completion": _completion,
    "help": _help,
}


if __name__ == "__main__":
    sys.exit(main())
