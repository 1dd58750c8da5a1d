"""All branches of one seed, in one process: `python -m quantexp.extras.resolve.seed_process`, which saves starts.

Standard input has the task, standard output a JSON line for each branch when it is whole; all else that a library
prints goes to standard error. A user's error is a line with `error`, and exit code 1.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
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
            for each in task["branches"]:
                _write(results, {"branch": each["name"], **_result(each, task)})
        except QuantexpError as error:
            _write(results, {"error": str(error)})
            return 1
    return 0


def _result(each: dict[str, Any], task: dict[str, Any]) -> dict[str, Any]:
    held_out = HeldOut(each["first"], task["sequences"], task["in_all"])
    folder = RunDir(Path(task["folder"]) / each["name"])
    return dataclasses.asdict(run_branch(folder, task["steps"], held_out))


def _write(stream: Any, content: dict[str, Any]) -> None:
    stream.write(json.dumps(content, allow_nan=False) + "\n")
    stream.flush()


if __name__ == "__main__":
    sys.exit(main())
