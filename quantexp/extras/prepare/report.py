"""The report of a preparation, as tables and as JSON."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quantexp.data.prepare.work import PARTS
from quantexp.data.prepared import Card

#: Width of the longest bar, in columns.
_BAR = 40
#: Largest number of sources shown.
_MAX_SOURCES = 20


def report_json(prefix: Path, card: Card) -> dict[str, Any]:
    """Returns the document that `--json` prints."""
    return {
        "prefix": str(prefix),
        "dataset": card.dataset,
        "documents": dict(zip(PARTS, card.num_documents, strict=True)),
        "tokens": dict(zip(PARTS, card.num_tokens, strict=True)),
        "bytes": sum(card.num_bytes),
        "vocab_size": card.tokenizer.vocab_size,
        "tokenizer": card.tokenizer.fingerprint,
        "split": card.split,
        **card.report,
    }


def print_report(prefix: Path, card: Card, console: Console) -> None:
    """Prints the report as tables."""
    console.print(_counts(card))
    report = card.report
    text = report["num_text_bytes"] / max(1, sum(card.num_tokens) - sum(card.num_documents))
    rows = [
        ("read", f"{report['num_input_bytes']:,} bytes, as stored"),
        ("text", f"{report['num_text_bytes']:,} bytes, {report['num_chars']:,} characters"),
        ("tokens", f"{text:.2f} bytes of text each"),
        ("written", f"{sum(card.num_bytes):,} bytes"),
        *((f"left out: {reason}", f"{n:,}") for reason, n in report["left_out"].items()),
        ("rejected", f"{report['num_rejected']:,}"),
        *_special_names(report.get("num_naming_specials", 0)),
        (
            "tokenizer",
            f"{card.tokenizer.kind}, {card.tokenizer.vocab_size:,} ids, end of document "
            f"{card.tokenizer.eod}, {card.tokenizer.fingerprint[:12]}",
        ),
    ]
    table = Table(box=None, show_header=False)
    for name, value in rows:
        table.add_row(name, escape(value))
    console.print(table)
    if len(report["sources"]) > 1:
        console.print(_sources(report["sources"]))
    console.print(_lengths(report["lengths"]))
    console.print(f"data  {prefix}.bin {prefix}.idx {prefix}.json", soft_wrap=True, markup=False)


def print_rejected(prefix: Path, card: Card, console: Console) -> None:
    """Prints how many records could not be read, if any; callers print it last, where it is seen."""
    if num_rejected := card.report["num_rejected"]:
        total = sum(card.num_documents) + sum(card.report["left_out"].values()) + num_rejected
        words = f"{num_rejected:,} of {total:,} records could not be read: {prefix}.rejected.jsonl"
        console.print(f"rejected  {words}", soft_wrap=True, markup=False)


def _counts(card: Card) -> Table:
    table = Table(box=None)
    table.add_column("part")
    for name in ("documents", "tokens"):
        table.add_column(name, justify="right")
    for part, documents, tokens in zip(PARTS, card.num_documents, card.num_tokens, strict=True):
        table.add_row(part, f"{documents:,}", f"{tokens:,}")
    table.add_row("all", f"{sum(card.num_documents):,}", f"{sum(card.num_tokens):,}")
    return table


def _special_names(number: int) -> list[tuple[str, str]]:
    return [("special tokens", f"{number:,} documents name one, as text")] if number else []


def _sources(sources: dict[str, list[int]]) -> Table:
    table = Table("source", box=None)
    for name in ("documents", "tokens"):
        table.add_column(name, justify="right")
    ordered = sorted(sources.items(), key=lambda item: -item[1][1])
    for name, (documents, tokens) in ordered[:_MAX_SOURCES]:
        table.add_row(escape(name), f"{documents:,}", f"{tokens:,}")
    return table


def _lengths(lengths: dict[str, int]) -> Table:
    table = Table(box=None)
    table.add_column("tokens up to", justify="right")
    table.add_column("documents", justify="right")
    table.add_column("")
    most = max(lengths.values(), default=1) or 1
    first = next((i for i, n in enumerate(lengths.values()) if n), 0)
    for bound, number in list(lengths.items())[first:]:
        table.add_row(f"{int(bound):,}", f"{number:,}", "#" * round(_BAR * number / most))
    return table
