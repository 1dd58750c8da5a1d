"""Lines that break between words, and commands that do not break."""

from __future__ import annotations

import pytest
from rich.text import Text

from quantexp.terminal.fitted_table import Column, Shrink, fitted_table
from quantexp.terminal.wrapping import wrapped

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


def lines(text: str, room: int) -> list[str]:
    return [line.plain for line in wrapped(Text(text), room)]


@pytest.mark.parametrize("text", COMMANDS)
@pytest.mark.parametrize("room", [1, 20, 40, 80])
def test_commands_stay_on_a_line(text: str, room: int) -> None:
    broken = lines(text, room)
    assert [c for c in COMMANDS[text] if not any(c in line for line in broken)] == []
    assert " ".join(broken) == text
    for line in broken:
        assert len(line) <= room or " " not in line or "quantexp" in line


def test_indented_and_empty_lines_stay() -> None:
    assert lines("a\n\n  b c", 6) == ["a", "", "  b c"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_column_with_a_command_is_wide_enough_or_left_out(width: int) -> None:
    text, (command,) = next(iter(COMMANDS.items()))
    columns = [Column("run"), Column("why", worth=1, shrink=Shrink.WRAP, min_width=20)]
    fitted = fitted_table(columns, [["linear_mxfp8-1a2b3c4d", text]], width)
    cells = [str(cell) for column in fitted.table.columns for cell in column.cells]
    shown = any(command in line for cell in cells for line in cell.splitlines())
    assert shown == (fitted.left_out == ())
    assert shown == (width >= 80)
