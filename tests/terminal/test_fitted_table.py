"""Tables that fit their width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quantexp.terminal.fitted_table import Column, Fitted, Shrink, fitted_table, wrapped

REASON = "the time limit of 240 min was reached at iteration 3 of 8; give more"
NAME = "llama32-1b_wikipedia_FA_linear_mxfp8-36da3b10"
COLUMNS = (
    Column("run", shrink=Shrink.CUT_START),
    Column("loss", is_number=True),
    Column("tokens/s", worth=2, is_number=True),
    Column("why", worth=1, shrink=Shrink.WRAP, min_width=20),
)
ROWS = [[NAME, "3.25", "15,420", REASON], ["short", "-", "-", ""]]


def lines(fitted: Fitted, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(fitted.table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", range(30, 170, 7))
def test_no_line_is_longer_than_the_width_and_no_word_is_broken(width: int) -> None:
    fitted = fitted_table(COLUMNS, ROWS, width)
    output = lines(fitted, width)
    assert all(len(line) <= width for line in output)
    words = {word for line in output for word in line.split()}
    whole = {*REASON.split(), NAME, "short", "3.25", "15,420", "-"}
    whole |= {column.heading for column in COLUMNS}
    assert {word for word in words if not word.startswith("…")} <= whole


def test_least_important_columns_are_dropped_first() -> None:
    assert fitted_table(COLUMNS, ROWS, 160).left_out == ()
    assert fitted_table(COLUMNS, ROWS, 70).left_out == ("why",)
    assert fitted_table(COLUMNS, ROWS, 60).left_out == ("why", "tokens/s")


def test_a_name_loses_its_beginning_only_where_nothing_else_helps() -> None:
    assert lines(fitted_table(COLUMNS, ROWS, 60), 60)[1].split() == [NAME, "3.25"]
    assert lines(fitted_table(COLUMNS, ROWS, 30), 30)[1].split() == [
        "…A_linear_mxfp8-36da3b10",
        "3.25",
    ]


def test_a_column_without_content_is_left_out() -> None:
    columns = (Column("run"), Column("reason", worth=1), Column("loss"))
    fitted = fitted_table(columns, [["a", "", "1"], ["b", "", "2"]], 80)
    assert lines(fitted, 80)[0].split() == ["run", "loss"]
    assert fitted.left_out == ()


def test_a_heading_of_two_lines_takes_the_width_of_the_longer() -> None:
    columns = (Column("mxfp4\ne2m1", is_number=True), Column("x"))
    output = lines(fitted_table(columns, [["1", "2"]], 80), 80)
    assert output == ["mxfp4", " e2m1  x", "    1  2"]


def test_an_end_is_cut_with_an_ellipsis() -> None:
    columns = (Column(), Column(shrink=Shrink.CUT_END, worth=1, min_width=12))
    (line,) = lines(fitted_table(columns, [["3/8", "capturing iteration 1"]], 20), 20)
    assert line == "3/8  capturing iter…"


def test_a_number_that_does_not_fit_shows_that_it_is_cut() -> None:
    columns = (Column("gap", is_number=True), Column("loss", is_number=True))
    fitted = fitted_table(columns, [["+0.1234", "3.123456"]], 14)
    (row,) = lines(fitted, 14)[1:]
    assert "…" in row
    assert not {"+0.123", "3.12345"} & {*row.split()}, "digits lost in silence"


def test_brackets_of_text_are_no_markup() -> None:
    fitted = fitted_table((Column("a"),), [[Text("out [of] memory")]], 80)
    assert lines(fitted, 80)[1] == "out [of] memory"


@pytest.mark.parametrize("width", [*range(12, 40, 5), *range(70, 130, 10)])
def test_rows_look_as_rich_draws_them(width: int) -> None:
    columns = (*COLUMNS[:3], Column("why", shrink=Shrink.WRAP, min_width=20))
    whys = ["", "\t".join("abcdef"), REASON, "two\nlines", " x ", "[red]漢字 in red[/]", "-" * 30]
    rows = [
        [f"{NAME}{i}", f"{i} ", f"[green]{i}[/]\n" if i == 5 else "", whys[i % 7]]
        for i in range(40)
    ]
    fitted = fitted_table(columns, rows, width).table
    by_rich = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for each in fitted.columns:
        by_rich.add_column(
            each.header,
            justify=each.justify,
            no_wrap=each.no_wrap,
            overflow=each.overflow,
            width=each.width,
        )
    for row in zip(*fitted.cells, strict=True):
        by_rich.add_row(*row)

    def drawn(table: Table) -> str:
        out = io.StringIO()
        Console(file=out, width=width, force_terminal=True).print(table)
        return out.getvalue()

    assert drawn(fitted) == drawn(by_rich)


def test_a_cell_that_tabs_make_too_wide_stays_beside_its_row() -> None:
    columns = (Column("run"), Column("why", shrink=Shrink.WRAP))
    fitted = fitted_table(columns, [["1", "\t".join("abcdef")], ["2", "x"]], 80)
    first_letters = "".join(line[0] for line in lines(fitted, 80))
    assert first_letters.split() == ["r1", "2"]


#: Texts with the commands in them that a person copies.
COMMANDS = {
    "no figures were drawn (disk full); quantexp draw '/runs of mine/a  b_FA_mxfp8-1a2b3c4d'": [
        "quantexp draw '/runs of mine/a  b_FA_mxfp8-1a2b3c4d'"
    ],
    "no baseline; to make one: quantexp model=tiny training=fast 'quant=glob(*)'": [
        "quantexp model=tiny training=fast 'quant=glob(*)'"
    ],
    "not written (quantexp report runs/a writes it), see quantexp logs a -f, or wait": [
        "quantexp report runs/a",
        "quantexp logs a -f",
    ],
    "see `quantexp captures 'x y' --check`; it lists quant=a,b": [
        "quantexp captures 'x y' --check"
    ],
}


def wrapped_lines(text: str, room: int) -> list[str]:
    return [line.plain for line in wrapped(Text(text), room)]


@pytest.mark.parametrize("text", COMMANDS)
@pytest.mark.parametrize("room", [1, 20, 40, 80])
def test_commands_stay_on_a_line(text: str, room: int) -> None:
    broken = wrapped_lines(text, room)
    assert [c for c in COMMANDS[text] if not any(c in line for line in broken)] == []
    assert " ".join(broken) == text
    for line in broken:
        assert len(line) <= room or " " not in line or "quantexp" in line


def test_indented_and_empty_lines_stay() -> None:
    assert wrapped_lines("a\n\n  b c", 6) == ["a", "", "  b c"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_column_with_a_command_is_wide_enough_or_left_out(width: int) -> None:
    text, (command,) = next(iter(COMMANDS.items()))
    columns = [Column("run"), Column("why", worth=1, shrink=Shrink.WRAP, min_width=20)]
    fitted = fitted_table(columns, [["linear_mxfp8-1a2b3c4d", text]], width)
    cells = [cell.plain for column in fitted.table.cells for cell in column]
    shown = any(command in line for cell in cells for line in cell.splitlines())
    assert shown == (fitted.left_out == ())
    assert shown == (width >= 80)
