"""`quantexp list [KIND ...]`: the choices in the configuration's folders, and the runs; composes nothing."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quantexp.cli.arguments import root_and_rest
from quantexp.cli.flags import KINDS
from quantexp.cli.output import print_json
from quantexp.config.choices import choice_files, comment, require_folder
from quantexp.errors import ConfigError
from quantexp.formats.definitions.files import FOLDER, read_format
from quantexp.formats.table import FORMATS
from quantexp.formats.types import WHOLE_ROW, Format
from quantexp.formats.words import (
    code_words,
    element_words,
    num_values,
    scale_words,
    smallest_value,
)
from quantexp.quant.scheme import SCHEMES
from quantexp.terminal.close_matches import did_you_mean, near
from quantexp.terminal.console import output_console
from quantexp.terminal.facts import Facts


def run(arguments: argparse.Namespace) -> int:
    """Print the named kinds, or the names of all but the runs; returns 0.

    Raises:
        ConfigError: an unknown kind, or a user's folder that is not there.
    """
    root, kinds = root_and_rest(arguments.words)
    content = record(kinds, arguments.config_dir, root)
    if arguments.json:
        print_json({kind: list(rows) for kind, rows in content.items()})
    else:
        (show if kinds else show_names)(content, output_console())
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
    require_folder(config_dir)
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


def record(
    kinds: list[str], config_dir: Path | None, root: Path
) -> dict[str, Sequence[dict[str, Any]]]:
    """The output of `list --json`: the named kinds, or all but the runs."""
    return {
        kind: _rows(kind, config_dir, root) for kind in kinds or [k for k in KINDS if k != "runs"]
    }


def _rows(kind: str, config_dir: Path | None, root: Path) -> Sequence[dict[str, Any]]:
    if kind == "runs":
        from quantexp.cli.list_runs import run_rows  # the choices need no reader of runs

        return run_rows(root)
    if kind == "formats":
        return format_rows(config_dir)
    return [{"name": choice.name, "about": choice.about} for choice in choices(kind, config_dir)]


def format_rows(config_dir: Path | None = None) -> list[dict[str, object]]:
    """A row for each format: those of the table in its order, then the declared ones, the user's last.

    Largest and smallest are the element's, without a scale.

    Raises:
        ConfigError: a file of the user's folder declares no format.
    """
    return [
        {
            "name": fmt.name,
            "about": about,
            "aliases": list(fmt.aliases),
            "element": element_words(fmt),
            "element_bits": fmt.element.bits,
            "values": num_values(fmt),
            "bits": fmt.bits_each(),
            "block": _block(fmt),
            "scale": scale_words(fmt),
            "largest": fmt.element.max,
            "smallest": smallest_value(fmt),
            "code": code_words(fmt),
        }
        for fmt, about in _formats(config_dir)
    ]


def _formats(config_dir: Path | None) -> Iterator[tuple[Format, str]]:
    """Every format, with its source or the comment of its file."""
    for fmt in FORMATS.values():
        yield fmt, fmt.source
    require_folder(config_dir)
    for name, file in choice_files(FOLDER, config_dir).items():
        try:
            yield replace(read_format(file), name=name), comment(file)
        except (OSError, ValueError) as error:
            raise ConfigError(str(error)) from error


def _block(fmt: Format) -> int | list[int] | str | None:
    """As in a definition."""
    if fmt.block is None or fmt.across > 1:
        return fmt.block and [fmt.across, fmt.block]
    if fmt.grid_scale is not None and fmt.grid_scale.each:
        return fmt.grid_scale.each
    return "row" if fmt.block >= WHOLE_ROW else fmt.block


def show(content: Mapping[str, Sequence[dict[str, Any]]], console: Console) -> None:
    """Print the listing."""
    for kind, rows in content.items():
        if not rows:
            console.print(f"{kind}: none")
        elif kind == "runs":
            from quantexp.cli.list_runs import Rows, print_runs

            assert isinstance(rows, Rows)
            print_runs(rows, console)
        elif kind == "formats":
            _print_formats(rows, console)
        else:
            direct = [row for row in rows if "/" not in row["name"]]
            _print_choices(kind, direct, console)
            if in_folders := [row for row in rows if row not in direct]:
                _print_choices(f"more {kind}", in_folders, console)


def _print_choices(title: str, rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(row["name"], escape(row["about"]))
    console.print(table)


def show_names(content: Mapping[str, Any], console: Console) -> None:
    """Print the names of each kind; of choices in folders their number."""
    facts = Facts(console)
    for kind, rows in content.items():
        names = [row["name"] for row in rows]
        direct = [name for name in names if "/" not in name]
        others = f" and {len(names) - len(direct)} more" if len(direct) < len(names) else ""
        facts.add_row(kind, escape(", ".join(direct)) + others)
    facts.print()
    console.print(
        "descriptions of a kind, and runs: quantexp list schemes, quantexp list runs",
        soft_wrap=True,
    )


def _print_formats(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(title="formats", title_justify="left", box=None, pad_edge=True)
    table.add_column("format", style="bold", no_wrap=True)
    for name in ("bits", "values", "block", "largest", "smallest"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("scale", overflow="fold")
    for row in rows:
        block = row["block"]
        table.add_row(
            row["name"],
            f"{row['bits']:.4g}",
            f"{row['values']:,}",
            " x ".join(map(str, block)) if isinstance(block, list) else str(block or "-"),
            f"{row['largest']:.{5 if row['largest'] < 1e5 else 3}g}",
            f"{row['smallest']:.3g}",
            row["scale"],
        )
    console.print(table)
