from __future__ import annotations

from pathlib import Path

import pytest

from quantexp.analysis.draw.drawn import NAME, Drawn
from quantexp.analysis.draw.work import Done

DONE = Done({"abs_max": 1.0}, "all zero")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    for name in ("a.png", "a.pdf", "b.json"):
        (tmp_path / name).touch()
    return tmp_path


def test_finished_work_is_recognised_while_its_inputs_and_files_are_the_same(out: Path) -> None:
    Drawn(out).add("a", [1], ["a.png"], DONE)
    drawn = Drawn(out)
    line = drawn.find("a", [1], ["a.png"])
    assert line is not None
    assert line.done == DONE
    assert drawn.find("a", [2], ["a.png"]) is None
    assert drawn.find("a", [1], ["a.pdf"]) is None, "it was not drawn in this format"
    (out / "a.png").unlink()
    assert drawn.find("a", [1], ["a.png"]) is None


def test_formats_of_an_earlier_draw_stay_on_record(out: Path) -> None:
    for kind in ("png", "pdf"):
        Drawn(out).add("a", [1], [f"a.{kind}"], DONE)
    assert Drawn(out).find("a", [1], ["a.png", "a.pdf"]) is not None
    Drawn(out).add("a", [2], ["a.pdf"], DONE)
    assert Drawn(out).find("a", [2], ["a.png"]) is None, "it is of other values"


def test_a_torn_line_is_skipped_and_later_removed(out: Path) -> None:
    Drawn(out).add("a", [1], ["a.png"], DONE)
    whole = (out / NAME).read_text()
    (out / NAME).write_text(whole + '{"name": "b", "key": [1], "fi')
    drawn = Drawn(out)
    assert drawn.find("b", [1]) is None
    drawn.add("a", [1], ["a.pdf"], DONE)
    assert Drawn(out).find("a", [1], ["a.png", "a.pdf"]) is not None
    assert (out / NAME).read_text().startswith(whole)


def test_a_chapter_is_drawn_once_and_its_earlier_files_are_no_longer_its_own(out: Path) -> None:
    calls: list[str] = []

    def draw(*names: str) -> list[Path]:
        calls.append(names[0])
        return [out / name for name in names]

    assert Drawn(out).once("a", 1, lambda: draw("a.png", "a.pdf")) == 2
    assert Drawn(out).once("a", 1, lambda: draw("a.png", "a.pdf")) == 2
    assert Drawn(out).once("a", 2, lambda: draw("b.json")) == 1
    assert Drawn(out).once("a", 2, lambda: draw("b.json")) == 1
    assert calls == ["a.png", "b.json"]
    (out / "b.json").unlink()
    Drawn(out).once("a", 2, lambda: draw("b.json"), is_complete=lambda: False)
    (out / "b.json").touch()
    Drawn(out).once("a", 3, lambda: draw("a.pdf"), is_complete=lambda: False)
    Drawn(out).once("a", 3, lambda: draw("a.pdf"))
    assert calls[2:] == ["b.json", "a.pdf", "a.pdf"]


def test_force_repeats_the_requested_work_and_keeps_the_record_of_the_rest(out: Path) -> None:
    Drawn(out).add("a", [1], ["a.png"], DONE)
    Drawn(out).once("b", 1, lambda: [out / "b.json"])
    forced = Drawn(out, force=True)
    assert forced.find("a", [1], ["a.png"]) is None
    forced.add("a", [1], ["a.png"], DONE)
    assert forced.find("a", [1], ["a.png"]) is not None
    assert Drawn(out).once("b", 1, lambda: pytest.fail("it was drawn before")) == 1
