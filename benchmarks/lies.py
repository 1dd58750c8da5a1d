"""Plants faults under quantexp's own quantisers, products, caches and passes, and says which the proof names.

    python benchmarks/lies.py [--fault GLOB] [--group NAME] [--setting GLOB] [--schemes | --variants | --layouts]
        [--json FILE] [--markdown FILE] [--passed] [--list] [--shard 0/2] [--read FILE ...]

A fault leaves the label as it is and lets something else run (`tests/proof/lies/faults`); a setting is a tiny run of
three iterations and two micro-batches (`tests/proof/lies/settings.py`). Each fault is planted in every setting that has
a place for it. The table has a line for each fault: in how many settings it had an effect on a loss, a gradient or a
weight, in how many of them the proof named it in the iteration in which the effect begins, and where it did not.
`--json` writes every pair as it is known, and goes on with a file that exists; `--read` plants nothing and makes the
table of such files. The whole table takes hours, that of one setting some minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]


def main() -> None:
    """Plant, print the table."""
    from tests.proof.lies.bench import Outcome, Status, outcome
    from tests.proof.lies.faults import FAULTS, Group
    from tests.proof.lies.pairs import pairs
    from tests.proof.lies.settings import LAYOUTS, SCHEMES, SETTINGS, VARIANTS
    from tests.proof.lies.table import markdown

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--fault", default="*", help="a name or a pattern")
    parser.add_argument("--group", choices=[group.name.lower() for group in Group])
    parser.add_argument("--setting", "--scheme", default="*", help="a name or a pattern")
    for name in ("schemes", "variants", "layouts"):
        parser.add_argument(f"--{name}", action="store_true", help=f"only the {name}")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--passed", action="store_true", help="list the pairs that pass")
    parser.add_argument(
        "--list", action="store_true", help="list faults and settings, and plant nothing"
    )
    parser.add_argument("--slow", action="store_true", help="with faults that need a compiler")
    parser.add_argument("--shard", default="0/1", help="part I of N of all pairs")
    parser.add_argument("--read", type=Path, nargs="+", default=[])
    parser.add_argument(
        "--no-effects", action="store_true", help="do not measure effects of what is named"
    )
    arguments = parser.parse_args()

    chosen = {
        name: group
        for name, group in (("schemes", SCHEMES), ("variants", VARIANTS), ("layouts", LAYOUTS))
        if getattr(arguments, name)
    }
    settings = [n for group in (chosen or {"": SETTINGS}).values() for n in group]
    settings = [n for n in settings if fnmatchcase(n, arguments.setting)]
    faults = [
        fault
        for name, fault in FAULTS.items()
        if fnmatchcase(name, arguments.fault)
        and arguments.group in (None, fault.group.name.lower())
        and (arguments.slow or not fault.is_slow)
    ]
    part, parts = map(int, arguments.shard.split("/"))
    if arguments.list:
        for fault in faults:
            print(f"{fault.group.name.lower():8} {fault.name:40} {fault.line}")  # noqa: T201
        print(f"{len(faults)} faults; settings: {', '.join(settings)}")  # noqa: T201
        return
    work = [pair for index, pair in enumerate(pairs(faults, settings)) if index % parts == part]
    known = [each for file in arguments.read for each in json.loads(file.read_text())]
    if known:
        work = []
    if arguments.json and arguments.json.exists():
        known += json.loads(arguments.json.read_text())
    done = {(each["fault"], each["setting"]) for each in known}
    begin, outcomes = (
        time.monotonic(),
        [Outcome(**{**each, "status": Status(each["status"])}) for each in known],
    )
    for index, (setting, fault) in enumerate(work):
        if (fault.name, setting) in done:
            continue
        one = outcome(setting, fault, with_effect=not arguments.no_effects)
        outcomes.append(one)
        if arguments.json and (index % 10 == 0 or index == len(work) - 1):
            _write(arguments.json, outcomes)
        counts = Counter(each.status.value for each in outcomes)
        sys.stderr.write(
            f"{index + 1} of {len(work)}, {time.monotonic() - begin:.0f} s: {setting}, {fault.name}: "
            f"{one.status.value}   {dict(counts)}\n"
        )
    if arguments.json:
        _write(arguments.json, outcomes)
    text = markdown(outcomes)
    if arguments.markdown:
        arguments.markdown.write_text(text)
    else:
        print(text)  # noqa: T201
    if arguments.passed:
        for each in outcomes:
            if each.status in (Status.PASSED, Status.LATE):
                pass


def _write(file: Path, outcomes: list[Any]) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps([each.record() for each in outcomes], indent=1))
    part.rename(file)


if __name__ == "__main__":
    main()
