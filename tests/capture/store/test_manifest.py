"""The lists of several ranks become one, even after an interruption."""

from __future__ import annotations

from pathlib import Path

import orjson

from quantexp.capture.store.manifest import MANIFEST, STATISTICS, join_parts, lines_of, part_of


def test_each_rank_has_a_list_of_its_own(tmp_path: Path) -> None:
    assert part_of(tmp_path / MANIFEST, 0) == tmp_path / "manifest.jsonl"
    assert part_of(tmp_path / MANIFEST, 2) == tmp_path / "manifest.rank2.jsonl"


def test_lines_are_joined_in_the_order_of_ranks(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        part_of(tmp_path / MANIFEST, rank).write_text(f'{{"rank": {rank}}}\n')
    part_of(tmp_path / STATISTICS, 1).write_text("{}\n")
    join_parts(tmp_path)
    assert (tmp_path / MANIFEST).read_text() == '{"rank": 0}\n{"rank": 2}\n{"rank": 10}\n'
    assert {file.name for file in tmp_path.iterdir()} == {MANIFEST, STATISTICS}


def test_line_that_a_killed_rank_left_unfinished_is_left_out(tmp_path: Path) -> None:
    part_of(tmp_path / MANIFEST, 1).write_text('{"rank": 1}\n{"ran')
    join_parts(tmp_path)
    assert (tmp_path / MANIFEST).read_text() == '{"rank": 1}\n'


def test_join_interrupted_before_it_deleted_the_parts_gives_the_same_list(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"rank": 0}\n{"rank": 1}\n')
    part_of(tmp_path / MANIFEST, 1).write_text('{"rank": 1}\n')
    join_parts(tmp_path)
    assert (tmp_path / MANIFEST).read_text() == '{"rank": 0}\n{"rank": 1}\n'


def test_one_ranks_lists_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("{")
    join_parts(tmp_path)
    join_parts(tmp_path / "none")
    assert (tmp_path / MANIFEST).read_text() == "{"


def test_letters_beyond_ascii_are_read_back_unchanged(tmp_path: Path) -> None:
    """U+2028 and U+0085 end a line of text, but no line of JSON."""
    lines = [{"quant_type": "größer\u2028\u0085"}, {"quant_type": "日本"}]
    part_of(tmp_path / MANIFEST, 1).write_bytes(
        b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines)
    )
    join_parts(tmp_path)
    assert list(lines_of(tmp_path / MANIFEST)) == lines
