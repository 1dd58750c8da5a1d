"""`quantexp list [KIND ...]`: the choices in the configuration's folders, and the runs; composes nothing."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quantexp.cli.arguments import root_and_rest
from quantexp.cli.output import print_json
from quantexp.cli.verbs import KINDS
from quantexp.config.choices import choice_files, comment
from quantexp.errors import ConfigError
from quantexp.formats.table import FORMATS
from quantexp.formats.types import Family, Format
from quantexp.quant.scheme import SCHEMES
from quantexp.terminal.close_matches import did_you_mean, near
from quantexp.terminal.console import output_console

#: What a format's scales are.
_SCALE = {
    Family.MX: "a power of two (E8M0) a block",
    Family.NV: "E4M3 a block, float32 a tensor",
    Family.FP8: "float32 a tensor",
    Family.HIF8: "none, or a power of two a tensor",
    Family.BF16: "none",
}


def run(arguments: argparse.Namespace) -> int:
    """Print the named kinds, or all but the runs; returns 0.

    Raises:
        ConfigError: an unknown kind, or a user's folder that is not there.
    """
    root, kinds = root_and_rest(arguments.words)
    content = record(kinds, arguments.config_dir, root)
    if arguments.json:
        print_json(content)
    else:
        show(content, output_console())
    return 0


@dataclass(frozen=True)
class Choice:
    """The name of a choice, and its description."""

    name: str
    about: str


def choices(kind: str, config_dir: Path | None) -> list[Choice]:
    """The choices of one kind that is a configuration group: shipped ones and those of the user's folder.

    Raises:
        ConfigError: an unknown kind; a user's folder that is not there.
    """
    group = KINDS.get(kind)
    if group is None:
        close = did_you_mean(near(kind, KINDS))
        raise ConfigError(
            f"list must be one of {', '.join(KINDS)}, got {kind!r}{close and f'; {close}'}"
        )
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(f"--config-dir must be a folder, got {str(config_dir)!r}")
    files = choice_files(group, config_dir)
    listed = [Choice(name, _about(file, group == "quant")) for name, file in files.items()]
    if group != "quant":
        return listed
    order = {name: index for index, name in enumerate(SCHEMES)}
    return sorted(listed, key=lambda c: (order.get(c.name, len(order)), c.name))


def _about(file: Path, is_scheme: bool) -> str:
    """The comment at the head of a file; for the ten schemes, which have none, their sites."""
    about = comment(file)
    if about or not is_scheme or file.stem not in SCHEMES:
        return about
    linear, qk = SCHEMES[file.stem]
    return f"linear {linear}, QK {qk}, PV none"


def record(kinds: list[str], config_dir: Path | None, root: Path) -> dict[str, object]:
    """The output of `list --json`: the named kinds, or all but the runs."""
    return {
        kind: _rows(kind, config_dir, root) for kind in kinds or [k for k in KINDS if k != "runs"]
    }


def _rows(kind: str, config_dir: Path | None, root: Path) -> list[dict[str, object]]:
    if kind == "runs":
        from quantexp.cli.list_runs import run_rows  # the choices need no reader of runs

        return run_rows(root)
    if kind == "formats":
        return format_rows()
    return [{"name": choice.name, "about": choice.about} for choice in choices(kind, config_dir)]


def format_rows() -> list[dict[str, object]]:
    """A row for each format, in the order of the table; largest and smallest are the element's, without a scale."""
    return [
        {
            "name": fmt.name,
            "about": fmt.source,
            "aliases": list(fmt.aliases),
            "element": fmt.element.name,
            "element_bits": fmt.element.bits,
            "block": fmt.block,
            "scale": _SCALE[fmt.family],
            "largest": fmt.element.max,
            "smallest": smallest(fmt),
        }
        for fmt in FORMATS.values()
    ]


def smallest(fmt: Format) -> float:
    """The smallest positive value, a subnormal; for HiF8, `emin` is already its exponent."""
    element = fmt.element
    subnormal_bits = 0 if fmt.family is Family.HIF8 else element.mantissa_bits
    return float(2.0 ** (element.emin - subnormal_bits))


def show(content: dict[str, object], console: Console) -> None:
    """Print the listing."""
    for kind, rows in content.items():
        assert isinstance(rows, list)
        if not rows:
            console.print(f"{kind}: none")
        elif kind == "runs":
            from quantexp.cli.list_runs import print_runs

            print_runs(rows, console)
        elif kind == "formats":
            _print_formats(rows, console)
        else:
            table = Table(
                title=kind, title_justify="left", show_header=False, box=None, pad_edge=True
            )
            table.add_column(style="bold", no_wrap=True)
            table.add_column(overflow="fold")
            for row in rows:
                table.add_row(row["name"], escape(row["about"]))
            console.print(table)


def _print_formats(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="formats", title_justify="left", box=None, pad_edge=True)
    table.add_column("format", style="bold", no_wrap=True)
    for name in ("bits", "block", "largest", "smallest"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("scale", overflow="fold")
    for row in rows:
        table.add_row(
            row["name"],
            str(row["element_bits"]),
            "-" if row["block"] is None else str(row["block"]),
            f"{row['largest']:.{5 if row['largest'] < 1e5 else 3}g}",
            f"{row['smallest']:.3g}",
            row["scale"],
        )
    console.print(table)
