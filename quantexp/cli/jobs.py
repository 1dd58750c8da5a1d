"""What the verbs share that jobs of a cluster may do: `prepare`, in parts, and `requantise` and `draw`, as one job.

python -m quantexp.cli.jobs RESULT.partial draw DIR ...     is that one job: it runs the command itself
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from quantexp.cli.output import print_json
from quantexp.errors import ConfigError
from quantexp.folders import short_path
from quantexp.launch.backend import DividedJobs, DividedWork, launcher_of
from quantexp.schema import Experiment
from quantexp.terminal.console import error_console, output_console
from quantexp.terminal.facts import Facts

#: The words that choose a launcher.
_LAUNCHER = re.compile(r"[+~]*launcher[=.@]")
#: What a repeated command does if it continues.
RESUMES = "it makes only what is missing"
#: The exit code of a command that a signal ended; the cluster may start its job again.
_INTERRUPTED = 130
#: Jobs, and outputs of unfinished tasks, that are listed one by one.
FEW = 12


def cluster_of(
    arguments: argparse.Namespace, *, uses_config_dir: bool = False
) -> Experiment | None:
    """The experiment with the launcher that the words choose, which it removes from them; None for this machine.

    Args:
        arguments: the parsed command line.
        uses_config_dir: whether the verb itself reads the user's folder, which otherwise chooses a launcher.

    Raises:
        ConfigError: an invalid launcher, or keys of one for this machine.
    """
    chosen = [word for word in arguments.words if _LAUNCHER.match(word)]
    arguments.words = [word for word in arguments.words if word not in chosen]
    roots = [word for word in arguments.words if word.startswith("paths.root=")]
    if not chosen and arguments.config_dir is None:
        return None
    from quantexp.config.compose import compose

    experiment = compose([*chosen, *roots], arguments.config_dir, {})
    if not experiment.launcher.is_local:
        return experiment
    rest = [word for word in chosen if word != "launcher=local"]
    if arguments.config_dir is not None and not uses_config_dir:
        rest.append("--config-dir")
    if rest:
        raise ConfigError(
            f"{rest[0].partition('=')[0]} is for the jobs of a cluster: add launcher=slurm; "
            "on this machine --jobs is the number of processes"
        )
    return None


def submit(work: DividedWork, experiment: Experiment, *, as_json: bool = False) -> int:
    """Submit work to the experiment's launcher and print the jobs; returns 0.

    Raises:
        ConfigError: the launcher has no jobs for it.
        RunError: the jobs cannot be submitted.
    """
    jobs = launcher_of(experiment.launcher.kind).divide(work, experiment, error_console())
    if as_json:
        print_json({"result": str(work.result), **record(jobs)})
    else:
        show(jobs, output_console())
    return 0


def record(submission: DividedJobs) -> dict[str, Any]:
    """The jobs as `--json` prints them, without the result."""
    return {
        "submitted": bool(submission.submitted),
        "jobs": [{"id": one.id, "activity": one.activity} for one in submission.jobs],
        "folder": str(submission.folder),
        "follow": submission.follow,
        "stop": submission.stop,
    }


def show(submission: DividedJobs, console: Console) -> None:
    """Print the jobs, and how to follow and stop them."""
    table, work = Facts(console), submission.work
    for words in submission.submitted:
        table.add_line("submitted", words)
    if not submission.submitted:
        table.add_line("not sent", f"these jobs {work.verb} it already")
        _add_few(table, [(f"job {one.id}", one.activity) for one in submission.jobs])
    table.add_path("result", work.result)
    table.add_path("logs", submission.folder)
    if submission.earlier is not None:
        table.add_line("", f"{short_path(submission.earlier)} (the jobs before)")
        logs = [short_path(log) for log in submission.unfinished]
        _add_few(table, [("", f"{log} (did not finish)") for log in logs])
    for number, command in enumerate(submission.follow):
        table.add_line("" if number else "follow", command)
    table.add_line("stop", submission.stop)
    table.add_line("resume", f"the same command: {work.again}")
    table.print()


def _add_few(table: Facts, lines: list[tuple[str, str]]) -> None:
    for title, words in lines[:FEW]:
        table.add_line(title, words)
    if len(lines) > FEW:
        table.add_line("", f"and {len(lines) - FEW} more")


def _run_in_job(record: str, words: Sequence[str]) -> int:
    """Run a command, and remove the record of its submission when it has ended; the exit code."""
    from quantexp.cli.main import main

    code = main(list(words))
    if code != _INTERRUPTED:
        shutil.rmtree(record, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(_run_in_job(sys.argv[1], sys.argv[2:]))
