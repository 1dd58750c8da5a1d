"""`quantexp verify --backend transformer_engine`: compares the bytes of its quantizers with the schemes' formats."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quantexp.cli.output import complain, print_json
from quantexp.terminal.console import output_console

if TYPE_CHECKING:
    from quantexp.extras.transformer_engine.conformance import Outcome

#: What differs as expected, by the names of `quantexp.extras.transformer_engine.proof.conformity`.
REASONS = {
    "NaN": "its amax leaves NaN out, so that only the element is NaN; ours gives NaN to the block",
    "Inf": "the scale of such a block is a number, ours NaN; its codes are not compared",
    "smallest": "up to version 2.12, a block whose scale is 2^-127 is flushed to zero",
    "zero block": "its scale of a block of zeros is another (1 x 128: 1, NVFP4: 0), with the same values",
    "NVFP4": "it multiplies by rounded reciprocals, which decides at the middle of two values, and flushes tiny blocks",
    "order of operations": "float32 block scales, whose last bits differ; up to 2 of 1,000 values may",
}


def run(as_json: bool) -> int:
    """Verify and print; returns 0, or 1 if a code or scale differs without a reason.

    Raises:
        RunError: there is no Transformer Engine.
        VerifyError: there is no GPU.
    """
    from quantexp.training.megatron.without_te import require_te

    require_te("verify --backend transformer_engine")
    from quantexp.extras.transformer_engine import conformance

    outcome = conformance.run_conformance()
    if as_json:
        print_json(record(outcome))
    else:
        show(outcome, output_console())
    if outcome.mismatches:
        complain(f"verify: {outcome.mismatches:,} codes and scales are not what they should be")
    return 1 if outcome.mismatches else 0


def record(outcome: Outcome) -> dict[str, Any]:
    """The output of `--json`."""
    return {
        "passed": not outcome.mismatches,
        "transformer_engine": outcome.version,
        "mismatches": outcome.mismatches,
        "absent": outcome.absent,
        # asdict would count the items of a Counter.
        "rows": [{**asdict(row), "expected": dict(row.expected)} for row in outcome.rows],
    }


def show(outcome: Outcome, console: Console) -> None:
    """Print the table, the first mismatch of each row, expected differences and absent recipes."""
    table = Table()
    for name in ("recipe", "operand", "format", "copy"):
        table.add_column(name, no_wrap=True)
    for name in ("elements", "mismatches", "expected"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in outcome.rows:
        words = (row.recipe, row.operand, row.format, row.copy)
        numbers = (row.elements, row.mismatches, row.expected.total())
        style = "red" if row.mismatches else None
        table.add_row(*map(escape, words), *(f"{number:,}" for number in numbers), style=style)
    console.print(table)
    lines = [
        f"{row.recipe}, {row.operand}, {row.copy}: {row.example}"
        for row in outcome.rows
        if row.example
    ]
    reasons = {reason for row in outcome.rows for reason in row.expected}
    lines += [f"expected, {name}: {why}" for name, why in REASONS.items() if name in reasons]
    lines += [f"absent: {name}: {reason}" for name, reason in outcome.absent.items()]
    lines.append(f"Transformer Engine {outcome.version}: {outcome.mismatches:,} differ")
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)
