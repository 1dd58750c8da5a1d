"""All branches of one seed, or its gradients, in one process: `python -m quantexp.extras.resolve.seed_process`.

Standard input has the task, standard output a JSON line for each branch when it is whole; all else that a library
prints goes to standard error. A user's error is a line with `error`, and exit code 1.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantexp.errors import QuantexpError
from quantexp.extras.resolve.branch import HeldOut, run_branch
from quantexp.processes.with_parent import end_with_parent, parent_from
from quantexp.runs.paths import RunDir
from quantexp.training.log import log_to_stderr


def main() -> int:
    """Run the branches of standard input's task; returns the exit code."""
    end_with_parent(parent_from(os.environ))
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what C code prints
    task = json.load(sys.stdin)
    with log_to_stderr("branch"), results:
        try:
            for name, measured in _results(task):
                _write(results, {"branch": name, **measured})
        except QuantexpError as error:
            _write(results, {"error": str(error)})
            return 1
    return 0


def _results(task: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What each branch measured, by its name."""
    folder, branches = Path(task["folder"]), task["branches"]
    if task["measure"] == "gradient":
        from quantexp.extras.resolve.gradient.passes import run_gradients

        yield from run_gradients(folder, branches, task["batches"], task["draws"], task["by"])
        return
    for each in branches:
        held_out = HeldOut(each["first"], task["sequences"], task["in_all"])
        measured = run_branch(RunDir(folder / each["name"]), task["steps"], held_out)
        yield each["name"], dataclasses.asdict(measured)
        gc.collect()  # a model is in cycles, and holds process groups with their threads


def _write(stream: Any, content: dict[str, Any]) -> None:
    stream.write(json.dumps(content, allow_nan=False) + "\n")
    stream.flush()


if __name__ == "__main__":
    sys.exit(main())
