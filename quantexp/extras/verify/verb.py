"""`quantexp verify`: compares the number formats on this machine with exact arithmetic and other libraries."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quantexp.cli.arguments import parser_of
from quantexp.cli.output import complain, print_json
from quantexp.extra import Service, required
from quantexp.folders import cache_dir, user_path
from quantexp.terminal.console import output_console

if TYPE_CHECKING:
    from quantexp.extras.verify.verification import Outcome


def run(arguments: argparse.Namespace) -> int:
    """Verify, print the table and save the certificates; returns 0, or 1 if a value differs.

    Raises:
        VerifyError: see `run_verify` and `backend`.
    """
    if arguments.backend is not None:
        if arguments.words or arguments.device or arguments.formats:
            parser_of("verify").error(
                "--backend compares all recipes on the GPU, and takes --json alone"
            )
        code: int = required(Service.CONFORMANCE, f"--backend {arguments.backend}")(arguments.json)
        return code
    from quantexp.extras.verify.verification import run_verify

    folders = [word for word in arguments.words if word.startswith("paths.cache=")]
    files = [word for word in arguments.words if word.endswith(".yaml") and word not in folders]
    if len(folders) + len(files) < len(arguments.words):
        parser_of("verify").error(
            "verify takes files of formats (NAME.yaml) and paths.cache=FOLDER alone, got "
            f"{' '.join(arguments.words)}"
        )
    folder = cache_dir(folders[-1].split("=", 1)[1] if folders else None)
    paths = [user_path(file) for file in files]
    outcome = run_verify(arguments.formats, arguments.device, folder, output_console(), paths)
    if arguments.json:
        print_json(record(outcome))
    else:
        show(outcome, output_console())
    if outcome.mismatches:
        complain(
            f"verify: {outcome.mismatches:,} of {outcome.cases:,} values are not what they should be"
        )
    return 1 if outcome.mismatches else 0


def record(outcome: Outcome) -> dict[str, Any]:
    """The output of `verify --json`."""
    return {
        "passed": not outcome.mismatches,
        "cases": outcome.cases,
        "mismatches": outcome.mismatches,
        "seconds": round(outcome.seconds, 1),
        "oracles": outcome.oracles,
        "absent": outcome.absent,
        "certificates": [str(file) for file in outcome.certificates],
        "rows": [asdict(row) for row in outcome.rows],
    }


def show(outcome: Outcome, console: Console) -> None:
    """Print the table, the first mismatches of each row, and the present and missing oracles."""
    from quantexp.extras.verify.gold_check import GOLD

    table = Table()
    for name in ("format", "kernel", "oracle"):
        table.add_column(name, no_wrap=True)
    for name in ("cases", "mismatches"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in outcome.rows:
        style = "red" if row.mismatches else None
        words = (row.format, row.kernel, row.oracle, f"{row.cases:,}", f"{row.mismatches:,}")
        table.add_row(*map(escape, words), style=style)
    console.print(table)
    for row in outcome.rows:
        for one in row.examples:
            where = f" of {one.input}" if one.input else ""
            console.print(
                f"{row.format}, {row.kernel}, {one.what}{where} at {one.at} ({one.request}): {row.oracle} says "
                f"{one.expected}, got {one.got}",
                soft_wrap=True,
                markup=False,
            )
    present = [GOLD, *(f"{name} {version}" for name, version in outcome.oracles.items())]
    console.print(f"oracles: {', '.join(present)}", soft_wrap=True, markup=False)
    for name, reason in outcome.absent.items():
        console.print(f"absent, not counted: {name}: {reason}", soft_wrap=True, markup=False)
    console.print(
        f"{outcome.cases:,} values compared in {outcome.seconds:.0f} s, {outcome.mismatches:,} differ",
        soft_wrap=True,
        markup=False,
    )
    for file in outcome.certificates:
        console.print(f"certificate: {file}", soft_wrap=True, markup=False)
    if not outcome.certificates:
        console.print(f"no certificate: only {', '.join(outcome.subjects)}", soft_wrap=True)
