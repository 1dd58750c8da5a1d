"""Published claims about quantised training, each decided by one command on the checkpoints of small bf16 runs.

    python benchmarks/claims.py RUNS OUT [--list claims-again] [--write]

RUNS is the folder of the bf16 runs, one a seed, that docs/experiments.md names with the rule that decides. OUT gets the
results of `quantexp gradient` and `quantexp branch`; what is there does not run again. The table is printed, or with
`--write` it and the figure take the place of those on the page. `--list` names another file, which has no figure.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from quantexp.analysis.style import (
    BLUE,
    GREY,
    INK,
    NOTE_PT,
    TICK_PT,
    dress,
    new_figure,
    save_figure,
)
from quantexp.runs.find import runs_below
from quantexp.runs.recorded_config import read_config

DOCS = Path(__file__).parent.parent / "docs"
#: The list that the figure shows.
FIRST = "claims"
#: Schemes that differ in one thing from those that they are compared with.
OWN = Path(__file__).parent / "claims"
REPRODUCED, REFUTED, EQUIVALENT, OPEN = (
    *("reproduced", "refuted at this size", "equivalent at this size", "not resolved"),
)
ERROR, BIAS, LOSS = "error", "bias", "loss"
#: Of branches: the horizon that decides, and those that are measured.
DECIDING, STEPS = 50, "20,50"
#: What the held-out text of the runs is enough for, with two checkpoints each.
SEEDS_OF_BRANCHES = 14
#: The measures' figures: title, label, factor of the numbers, the margin of equivalence.
PANELS = {
    ERROR: ("Error of the gradient", "ratio of the errors, as a logarithm", 1.0, math.log(1.05)),
    BIAS: ("Squared bias of the gradient", "in parts of the baseline's squared error", 1.0, 0.05),
    LOSS: (f"Loss after {DECIDING} steps", "1e-4 nats a token above the baseline", 1e4, 10.0),
}


@dataclass(frozen=True)
class Claim:
    """That a scheme's measure lies above or below that of another, or is equivalent."""

    paper: str
    text: str
    scheme: str
    against: str
    measure: str
    expected: str


def read_claims(name: str) -> list[Claim]:
    """Those of a list."""
    return [Claim(**each) for each in yaml.safe_load((OWN / f"{name}.yaml").read_text())]


def name_of(scheme: str) -> str:
    """The name in results, without the folder."""
    return scheme.rpartition("/")[2]


def outcome(claim: Claim, verdicts: Sequence[str]) -> str:
    """Of a claim, by its verdicts: of a gradient the raw one and that divided by Adam's root v, which must agree."""
    if set(verdicts) == {claim.expected}:
        return REPRODUCED
    if set(verdicts) == {"equivalent"}:
        return EQUIVALENT
    opposite = {"above": {"below"}, "below": {"above"}, "equivalent": {"above", "below"}}
    return REFUTED if set(verdicts) <= opposite[claim.expected] else OPEN


def rows_of(claim: Claim, runs: Path, out: Path) -> list[dict[str, Any]]:
    """The judgements that decide a claim, in the order of the verdicts."""
    schemes = [each for each in (claim.scheme, claim.against) if each != "bf16"]
    words = ["quant=" + ",".join(schemes), f"against={name_of(claim.against)}"]
    words += [
        "--config-dir",
        str(OWN),
        "--json",
        "launcher.num_threads=1",
        "launcher.max_parallel=1",
    ]
    if claim.measure == LOSS:
        words = [
            *_first(runs),
            *words,
            "--steps",
            STEPS,
            "--control",
            "none",
            f"out={out / 'branch'}",
        ]
        (rows,) = [_run("branch", words)["scheme_loss"]]
        return [row for row in rows if row["steps"] == DECIDING]
    words = [str(runs), *words, "--by", "none", f"out={out / 'gradient'}"]
    verdicts = _run("gradient", words)["verdicts"]
    return [verdicts[scaling][claim.measure][0] for scaling in ("raw", "adam")]


def _first(runs: Path) -> list[str]:
    """Those of the lowest seeds, as many as have held-out text of their own."""
    seed_of = {str(run.root): read_config(run)["training"]["seed"] for run in runs_below(runs)}
    return sorted(seed_of, key=lambda run: int(seed_of[run]))[:SEEDS_OF_BRANCHES]


def _run(verb: str, words: Sequence[str]) -> Any:
    command = [sys.executable, "-m", "quantexp", verb, *words]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def table(results: Sequence[tuple[Claim, list[dict[str, Any]]]]) -> str:
    """In Markdown, a row for each claim."""
    lines = [
        "| claim | arXiv | comparison | measure | raw, or loss | by Adam's root v | result |",
        "|---|---|---|---|---|---|---|",
    ]
    for claim, rows in results:
        cells = [_cell(claim, row) for row in rows] + [""] * (2 - len(rows))
        end = outcome(claim, [row["verdict"] for row in rows])
        pair = f"`{name_of(claim.scheme)}` to `{name_of(claim.against)}`"
        words = [claim.text, claim.paper, pair, claim.measure, *cells, f"**{end}**"]
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines)


def _cell(claim: Claim, row: dict[str, Any]) -> str:
    if row["interval"] is None:
        return str(row["verdict"])
    numbers = row["difference"], *row["interval"]
    if claim.measure == ERROR:
        mean, low, high = (f"x{math.exp(each):.2f}" for each in numbers)
    else:
        factor = PANELS[claim.measure][2]
        mean, low, high = (f"{each * factor:+.2g}" for each in numbers)
    return f"{mean} ({low} to {high})"


def draw(results: Sequence[tuple[Claim, list[dict[str, Any]]]], stem: Path) -> None:
    """A row for each claim, a panel for each measure: filled raw or a loss, hollow divided by Adam's root v."""
    panels = {m: [r for r in results if r[0].measure == m] for m in PANELS}
    heights = [len(own) + 1.5 for own in panels.values()]
    figure = new_figure(9.5, 0.27 * sum(heights) + 0.9)
    grid = figure.add_gridspec(len(panels), 1, height_ratios=heights, hspace=0.55)
    figure.subplots_adjust(left=0.42, right=0.97, top=0.95, bottom=0.1)
    for place, (measure, own) in enumerate(panels.items()):
        ax = figure.add_subplot(grid[place])
        title, label, factor, margin = PANELS[measure]
        ax.axvspan(-margin, margin, color=GREY, alpha=0.2, linewidth=0)
        ax.axvline(0, color=GREY, linewidth=1)
        for y, (_, rows) in enumerate(own):
            for number, row in enumerate(rows):
                at = y + 0.16 * (2 * number - 1) * (len(rows) > 1)
                low, high = row["interval"] or (row["difference"],) * 2
                ax.plot([low * factor, high * factor], [at, at], color=BLUE, linewidth=1.4)
                face = "white" if number else BLUE
                mean = row["difference"] * factor
                ax.plot([mean], [at], "o", color=BLUE, markerfacecolor=face, markersize=4.5)
        ax.set_yticks(range(len(own)))
        names = [textwrap.fill(f"{claim.text} ({claim.paper})", 58) for claim, _ in own]
        ax.set_yticklabels(names, fontsize=TICK_PT)
        ax.set_ylim(len(own) - 0.4, -0.6)
        dress(ax, title, label, "", grid="x")
    note = "95% intervals over seeds; filled: raw, hollow: divided by Adam's root v; grey: the margin of equivalence"
    figure.text(0.01, 0.015, note, fontsize=NOTE_PT, color=INK)
    save_figure(figure, stem, ("png",))


def main() -> None:
    """Decide, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--list", default=FIRST, help="the file of claims, without its ending")
    parser.add_argument("--write", action="store_true", help="replace table and figure of the page")
    arguments = parser.parse_args()
    name = arguments.list
    results = [
        (claim, rows_of(claim, arguments.runs, arguments.out)) for claim in read_claims(name)
    ]
    text = table(results)
    if not arguments.write:
        sys.stdout.write(f"{text}\n")
        return
    page = DOCS / "experiments.md"
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, rest = page.read_text().split(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}")
    if name == FIRST:
        draw(results, DOCS / FIRST)


if __name__ == "__main__":
    main()
