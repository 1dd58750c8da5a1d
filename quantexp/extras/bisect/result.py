"""The result of a search: the tables of the terminal, bisect.json, and a scheme that keeps the culprit in bf16.

The scheme is the run's with further rules, `quant/bisected.yaml` below the output folder:
`quantexp --config-dir FOLDER quant=bisected` trains with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from quantexp.analysis.scheme_yaml import rule_line, scheme_path, scheme_yaml
from quantexp.extras.bisect.measures import Measure
from quantexp.extras.bisect.search import Found, Observed, Verdict
from quantexp.extras.bisect.trouble import Trouble
from quantexp.runs.disk import write_whole
from quantexp.schema import QuantConfig, Rule
from quantexp.terminal.facts import Facts
from quantexp.terminal.fitted_table import Column, Shrink, fitted_table

#: Replays that are listed, the first ones; bisect.json and the figure have all.
_MOST_LISTED = 40
#: Units that are named in a cell.
_MOST_NAMED = 3
_COLUMNS = (
    Column("replay", is_number=True),
    Column("quantised", shrink=Shrink.WRAP),
    Column("measured", shrink=Shrink.WRAP),
    Column("trouble"),
    Column("run", worth=2),
)


@dataclass(frozen=True)
class Chance:
    """Replays from weights moved in last bits: of the whole scheme, and of bf16."""

    scheme: tuple[Observed, ...]
    bf16: tuple[Observed, ...]

    @property
    def is_likely(self) -> bool:
        """Whether last bits decide the trouble: the scheme lacks it once, or bf16 has it once."""
        return not all(each.is_trouble for each in self.scheme) or any(
            each.is_trouble for each in self.bf16
        )

    @property
    def words(self) -> str:
        """How many replays show the trouble."""
        counts = [
            f"{sum(o.is_trouble for o in each)} of {len(each)}" for each in (self.scheme, self.bf16)
        ]
        return f"from weights moved in last bits, the scheme shows it {counts[0]} times, bf16 {counts[1]}"


@dataclass(frozen=True)
class Result:
    """A search and what it was about."""

    run: str
    scheme: str
    #: The checkpoint, and the last replayed iteration.
    start: int
    last: int
    trouble: Trouble
    measure: Measure
    #: The units' names, in the order of their numbers.
    units: tuple[str, ...]
    found: Found
    #: How the replay of the whole scheme compares with the run itself.
    control: str
    #: The scheme's file, and the same as a word of the command line; None if nothing was found.
    file: str | None = None
    override: str | None = None
    #: None without such replays.
    chance: Chance | None = None

    def named(self, units: Iterable[int]) -> list[str]:
        """The names of units."""
        return [self.units[unit] for unit in sorted(units)]

    @property
    def words(self) -> str:
        """The verdict in one line."""
        if self.found.verdict is Verdict.NOT_QUANTISATION:
            return (
                "not the quantisation: the replay with no product quantised shows the trouble too"
            )
        if self.found.verdict is Verdict.NOT_REPRODUCED:
            return "not reproduced: the replay with nothing changed does not show the trouble"
        sets = [" and ".join(self.named(each)) for each in self.found.enough]
        doubt = ", or chance" if self.chance is not None and self.chance.is_likely else ""
        return f"the quantisation of {'; also that of '.join(sets)}{doubt}"


def print_result(result: Result, console: Console) -> None:
    """Print the replays, the verdict and what follows from it."""
    observed = result.found.observed
    rows = [
        [
            str(number),
            escape(quantised_words(each, result.units)),
            escape(each.words),
            "[red]yes[/]" if each.is_trouble else "[green]no[/]",
            escape(each.run.rpartition("-")[2]),
        ]
        for number, each in enumerate(observed[:_MOST_LISTED], 1)
    ]
    title = f"{len(observed)} replays of {escape(result.run)}"
    console.print(fitted_table(_COLUMNS, rows, console.width, title).table)
    if more := max(0, len(observed) - _MOST_LISTED):
        console.print(f"and {more} more, in bisect.json", style="dim italic")
    facts = Facts(console)
    facts.add_row("looked for", escape(result.trouble.words))
    facts.add_row("trouble is", escape(result.measure.about))
    facts.add_row("replayed", f"iterations {result.start + 1} to {result.last}")
    facts.add_row("control", escape(result.control))
    facts.add_row("verdict", f"[bold]{escape(result.words)}[/]")
    if result.chance is not None:
        facts.add_row("chance", escape(result.chance.words))
    if result.found.verdict is Verdict.FOUND:
        for each in result.found.enough:
            facts.add_row("enough alone", escape(", ".join(result.named(each))))
            others = result.named(set(range(len(result.units))) - each)
            facts.add_row("not enough", escape(f"bf16 for {listed(others)}: the trouble stays"))
        facts.add_row("keep in bf16", escape(", ".join(result.named(result.found.cure))))
        facts.add_row("", "all others stay quantised, and the trouble is gone")
    facts.print()


def quantised_words(each: Observed, units: Sequence[str]) -> str:
    """The units that a replay quantises, by the shorter of two lists."""
    chosen = [units[unit] for unit in sorted(each.quantised)]
    others = [name for unit, name in enumerate(units) if unit not in each.quantised]
    if not others:
        return "the whole scheme"
    if not chosen:
        return "nothing"
    if len(others) < len(chosen):
        return f"all but {listed(others)}"
    return listed(chosen)


def listed(names: Sequence[str]) -> str:
    """Names in one line: `a, b, c and 5 more`; `none`."""
    shown = ", ".join(names[:_MOST_NAMED]) or "none"
    more = len(names) - _MOST_NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def record(result: Result) -> dict[str, Any]:
    """The content of bisect.json."""
    found = result.found
    return {
        "run": result.run,
        "scheme": result.scheme,
        "start": result.start,
        "last": result.last,
        "looked_for": result.trouble.words,
        "measure": result.measure.name,
        "bound": result.measure.bound,
        "control": result.control,
        "verdict": found.verdict.value,
        "words": result.words,
        "units": list(result.units),
        "enough": [result.named(each) for each in found.enough],
        "keep_in_bf16": result.named(found.cure),
        "scheme_file": result.file,
        "override": result.override,
        "replays": [_plain(each, result) for each in found.observed],
        "chance": None
        if result.chance is None
        else {
            "likely": result.chance.is_likely,
            "scheme": [_plain(each, result) for each in result.chance.scheme],
            "bf16": [_plain(each, result) for each in result.chance.bf16],
        },
    }


def _plain(each: Observed, result: Result) -> dict[str, Any]:
    return {
        "quantised": result.named(each.quantised),
        "trouble": each.is_trouble,
        "measured": each.words,
        "run": each.run,
    }


NAME = "bisected"


def write_scheme(quant: QuantConfig, rules: Sequence[Rule], kept: str, folder: Path) -> Path:
    """Write the scheme with these rules after its own, and return the file's path."""
    changed = dataclasses.replace(quant, rules=[*quant.rules, *rules])
    content = _values(dataclasses.asdict(changed))
    listed = content.pop("rules", [])
    content.pop("name", None)
    about = f"{quant.name} with rules of `quantexp bisect` at its end, which keep in bf16: {kept}."
    path = scheme_path(folder, NAME)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, scheme_yaml(NAME, about, content, listed))
    return path


def override(quant: QuantConfig, rules: Sequence[Rule]) -> str:
    """The same rules as a word of the command line, after the words that chose the run's scheme."""
    listed = [_values(dataclasses.asdict(rule)) for rule in (*quant.rules, *rules)]
    return f"quant.rules=[{', '.join(map(rule_line, listed))}]"


def _values(content: Any) -> Any:
    """The keys that have a value, as a YAML file has them; an empty list of parts takes parts away."""
    if isinstance(content, dict):
        values = {key: _values(value) for key, value in content.items()}
        return {
            key: value
            for key, value in values.items()
            if value not in (None, {}, []) or (key == "parts" and value == [])
        }
    if isinstance(content, list):
        return [_values(each) for each in content]
    return content.value if isinstance(content, Enum) else content
