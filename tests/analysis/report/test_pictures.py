from __future__ import annotations

import base64
from pathlib import Path

from quantexp.analysis.report.write import pictures
from tests.analysis.compare.runs import Runs

PNG = b"\x89PNG\r\n\x1a\n"


def test_every_overview_comes_before_any_other_figure(runs: Runs) -> None:
    folders = [runs.add(), runs.add("FA_mxfp8")]
    for run in folders:
        (run.figures / "heatmaps").mkdir(parents=True)
        (run.figures / "quick_analysis.png").write_bytes(PNG + b"a" * 92)
        (run.figures / "heatmaps" / "b.png").write_bytes(PNG + b"b" * 92)
    first, second = pictures(folders, 350)
    assert [name for name, _ in first.shown] == ["quick_analysis.png", "heatmaps/b.png"]
    assert [name for name, _ in second.shown] == ["quick_analysis.png"]
    assert second.left_out == ["heatmaps/b.png"]
    assert base64.b64decode(first.shown[0][1]) == PNG + b"a" * 92


def test_files_that_are_no_png_or_outside_the_folder_are_not_shown(
    runs: Runs, tmp_path: Path
) -> None:
    run = runs.add()
    run.figures.mkdir()
    (run.figures / "a.png").write_text("<svg onload=alert(1)>")
    secret = tmp_path / "secret.png"
    secret.write_bytes(PNG)
    (run.figures / "b.png").symlink_to(secret)
    (figures,) = pictures([run])
    assert (figures.shown, figures.left_out) == ([], ["a.png"])


def test_an_overview_of_some_tensors_is_not_shown(runs: Runs) -> None:
    run = runs.add()
    run.figures.mkdir()
    for name in ("quick_analysis", "quick_analysis.filtered"):
        (run.figures / f"{name}.png").write_bytes(PNG)
    (figures,) = pictures([run])
    assert [name for name, _ in figures.shown] == ["quick_analysis.png"]
    assert figures.left_out == []


def test_a_large_figure_does_not_displace_several(runs: Runs) -> None:
    run = runs.add()
    for name, size in (("a/1", 300), ("b/1", 50), ("c/1", 100)):
        file = run.figures / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(PNG + b"a" * size)
    (figures,) = pictures([run], 330)
    assert [name for name, _ in figures.shown] == ["b/1.png", "c/1.png"]
    assert figures.left_out == ["a/1.png"]


def test_some_of_every_folder_come_before_all_of_one(runs: Runs) -> None:
    run = runs.add()
    for name in ("a/1", "a/2", "a/3", "b/1", "quick_analysis"):
        file = run.figures / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(PNG)
    (figures,) = pictures([run], 4 * len(PNG))
    names = [name for name, _ in figures.shown]
    assert names == ["quick_analysis.png", "a/1.png", "b/1.png", "a/2.png"]
    assert figures.left_out == ["a/3.png"]
