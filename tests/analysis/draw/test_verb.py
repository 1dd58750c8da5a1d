from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from quantexp.analysis.chapter import Chapter, Desk, Source
from quantexp.analysis.draw import verb
from quantexp.analysis.draw.work import Task, do
from quantexp.analysis.measures.row import TensorRow
from quantexp.analysis.measures.table import NAME
from quantexp.analysis.style import new_figure
from quantexp.analysis.tree import CHAPTER_FOLDERS, PARTS
from quantexp.capture.reader import CapturedTensor
from quantexp.cli.main import main
from quantexp.errors import CaptureError, ConfigError

from .conftest import Draw, Unhashed, normal, old_name

Captured = pytest.CaptureFixture[str]


def files(out: Path) -> set[str]:
    """The names of the files below a folder, without the table of measures."""
    return {
        str(path.relative_to(out))
        for path in out.rglob("*")
        if path.is_file() and path.name != NAME
    }


def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that collects the tensors that are looked at from now on."""
    looked: list[str] = []

    def do_and_note(task: Task) -> TensorRow:
        looked.append(task.entry.label)
        return do(task)

    monkeypatch.setattr("quantexp.analysis.draw.tensors.do", do_and_note)
    return looked


def test_the_whole_tree_is_drawn(run: Unhashed, draws: Draw, tmp_path: Path) -> None:
    outcome, complaints, _ = draws(run.run_dir, formats=("png", "svg"))
    assert complaints == []
    assert (outcome.num_tensors, outcome.num_known, outcome.problems) == (6, 0, {})
    names = files(tmp_path / "draw")
    assert outcome.num_files == len(names)
    stem = run.lines[0]["file"].removesuffix(".pt")
    for name in (
        "quick_analysis.png",
        "quick_analysis.svg",
        "tensor_stats.txt",
        f"distributions/{stem}.png",
        f"heatmaps/{stem}.svg",
        "statistics/statistics.json",
        "statistics/statistics.csv",
        "statistics/statistics.txt",
    ):
        assert name in names
    assert not any(name.endswith(".part") for name in names)


def test_worker_processes_draw_the_same_as_this_one(
    run: Unhashed, draws: Draw, tmp_path: Path
) -> None:
    request = {"only": ("heatmaps", "statistics"), "formats": ("png", "pdf", "svg")}
    draws(run.run_dir, out=tmp_path / "one", filters={"layer": "0"}, **request)
    draws(run.run_dir, out=tmp_path / "two", filters={"layer": "0"}, jobs=2, **request)
    names = files(tmp_path / "one")
    assert names
    assert names == files(tmp_path / "two")
    for name in names:
        if not name.endswith(".svg"):  # its identifiers are random
            assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_interrupted_work_resumes_where_it_stopped(
    run: Unhashed, draws: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[str] = []

    def interrupted(task: Task) -> TensorRow:
        if len(looked) == 2:
            raise KeyboardInterrupt
        looked.append(task.entry.label)
        return do(task)

    monkeypatch.setattr("quantexp.analysis.draw.tensors.do", interrupted)
    with pytest.raises(KeyboardInterrupt):
        draws(run.run_dir, only=("heatmaps",))
    assert len(looked) == 2
    again = watched(monkeypatch)
    outcome, _, printed = draws(run.run_dir, only=("heatmaps",))
    assert (outcome.num_tensors, outcome.num_known, len(again)) == (6, 2, 4)
    assert "2 of 6 tensors were drawn before" in printed
    assert not set(looked) & set(again)


@pytest.mark.slow
def test_ctrl_c_ends_the_command_and_its_workers_and_the_next_one_resumes(
    run: Unhashed, tmp_path: Path
) -> None:
    """Figures of 60 tensors are many seconds of work for two processes."""
    for place in range(60):
        run.add(normal(8, 8, seed=place), "input", layer=2 + place)
    words = [sys.executable, "-m", "quantexp", "draw", str(run.run_dir), f"out={tmp_path / 'draw'}"]
    words += ["--jobs", "2", "--only", "heatmaps", "--formats", "png"]
    journal = tmp_path / "draw/measures.jsonl"
    first = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    while not (journal.is_file() and journal.stat().st_size):
        assert first.poll() is None
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    _, stderr = first.communicate(timeout=60)
    assert (first.returncode, stderr) == (130, "quantexp: interrupted\n")
    num_drawn = len(journal.read_text().splitlines())
    assert 0 < num_drawn < 66
    again = subprocess.run(words, capture_output=True, text=True, check=True)
    assert f"{num_drawn} of 66 tensors were drawn before" in again.stderr
    assert again.stdout.startswith(f"66 tensors ({num_drawn} were drawn before), 67 files in ")


def test_finished_work_is_repeated_only_after_a_change(
    run: Unhashed, draws: Draw, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    draws(run.run_dir, only=("heatmaps",))
    looked = watched(monkeypatch)
    assert draws(run.run_dir, only=("heatmaps", "statistics"))[0].num_known == 6
    assert looked == []
    first, second, third = (run.lines[place]["file"] for place in range(3))
    torch.save({"tensor": torch.ones(4, 4)}, run.dir / first)
    (tmp_path / "draw/heatmaps" / second).with_suffix(".png").unlink()
    journal = tmp_path / "draw/measures.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    others = [line for line in lines if Path(third).stem not in line]
    journal.write_text("".join(others) + '{"name": "torn')
    outcome, _, _ = draws(run.run_dir, only=("heatmaps",))
    assert (outcome.num_known, len(looked)) == (3, 3)
    assert (tmp_path / "draw/heatmaps" / second).with_suffix(".png").is_file()
    looked.clear()
    draws(run.run_dir, only=("distributions",), filters={"layer": "0"})
    assert len(looked) == 3
    looked.clear()
    draws(run.run_dir, only=("heatmaps",), force=True)
    assert len(looked) == 6


def test_bad_files_are_named_and_counted_and_the_rest_is_drawn(
    run: Unhashed, draws: Draw, tmp_path: Path
) -> None:
    corrupt, truncated, missing, other = (run.dir / run.lines[i]["file"] for i in range(4))
    corrupt.write_bytes(b"not a tensor")
    truncated.write_bytes(truncated.read_bytes()[:-500])
    missing.unlink()
    torch.save({"weights": 1}, other)
    torch.save(normal(4), run.dir / "foreign.pt")
    outcome, complaints, _ = draws(run.run_dir, only=("statistics", "heatmaps"))
    assert outcome.num_tensors == 2
    assert len(outcome.problems) == len(complaints) == 5
    for path, words in (
        (corrupt, "is refused: it is no file of captured values, is damaged"),
        (truncated, "is refused: it is no file of captured values, is damaged"),
        (missing, "is missing although it is listed"),
        (other, "holds no tensor; was it captured?"),
        (run.dir / "foreign.pt", "is none of the captured tensors"),
    ):
        (line,) = (line for line in complaints if str(path) in line)
        assert words in line
    assert "files that could not be used: 5" in (tmp_path / "draw/tensor_stats.txt").read_text()


def test_the_command_ends_with_1_after_an_unusable_file(run: Unhashed, capsys: Captured) -> None:
    words = ["draw", str(run.run_dir), "--only", "statistics", "--jobs", "1"]
    assert main(words) == 0
    assert "6 tensors, 4 files in " in capsys.readouterr().out
    (run.dir / run.lines[0]["file"]).write_bytes(b"torn")
    assert main(words) == 1
    output = capsys.readouterr()
    assert "5 tensors (5 were drawn before), 4 files in " in output.out
    assert output.err.splitlines()[-1] == ("quantexp: 1 file could not be used, it is named above")
    (run.dir / run.lines[1]["file"]).write_bytes(b"torn")
    assert main(words) == 1
    assert "2 files could not be used, they are named above" in capsys.readouterr().err
    assert (run.run_dir / "figures/tensor_stats.txt").is_file()


@pytest.mark.slow
def test_a_bare_folder_and_an_old_collection_are_drawn(
    run: Unhashed, draws: Draw, tmp_path: Path
) -> None:
    bare = shutil.copytree(run.dir, tmp_path / "bare")
    old = tmp_path / "old"
    old.mkdir()
    torch.save({"tensor": normal(16, 16).half()}, old / old_name(1, "input"))
    torch.save(normal(16, 16), old / "20250908_095220_0002_attention_forward_hifp8_query.pt")
    torch.save(normal(16, 16), old / "20250908_092156_0003_attention_L0_forward_hifp8_query.pt")
    outcome, complaints, _ = draws(bare, old, filters={"tensor": "input,query"})
    assert complaints == []
    assert outcome.num_tensors == 5
    names = files(tmp_path / "draw")
    assert {"quick_analysis/bare.filtered.png", "quick_analysis/old.filtered.png"} <= names
    assert {
        "distributions/old/20250908_095220_0002_attention_forward_hifp8_query.png",
        "distributions/old/20250908_092156_0003_attention_L0_forward_hifp8_query.png",
    } <= names


def test_filters_do_not_change_the_picture_of_all_tensors(
    run: Unhashed, draws: Draw, tmp_path: Path
) -> None:
    only = ("quick_analysis",)
    draws(run.run_dir, only=only)
    out = tmp_path / "draw"
    whole = {name: (out / name).read_bytes() for name in files(out)}
    outcome, _, _ = draws(run.run_dir, only=only, filters={"layer": "0"})
    assert files(out) == whole.keys() | {"quick_analysis.filtered.png"}
    assert outcome.num_files == 1
    assert whole == {name: (out / name).read_bytes() for name in whole}
    assert (out / "quick_analysis.filtered.png").read_bytes() != whole["quick_analysis.png"]


def test_a_filtered_picture_of_several_runs_has_a_name_of_its_own(
    run: Unhashed, draws: Draw, tmp_path: Path
) -> None:
    bare = shutil.copytree(run.dir, tmp_path / "bare")
    draws(run.run_dir, bare, only=("quick_analysis",), filters={"layer": "0"})
    label = run.run_dir.name
    assert {name for name in files(tmp_path / "draw") if name.endswith(".png")} == {
        "quick_analysis.filtered.png",
        "quick_analysis/bare.filtered.png",
        f"quick_analysis/{label}.filtered.png",
    }


def test_a_run_without_tensors_has_a_quick_analysis(
    run: Unhashed, draws: Draw, tmp_path: Path
) -> None:
    shutil.rmtree(run.dir)
    outcome, _, printed = draws(run.run_dir)
    assert (outcome.num_tensors, outcome.problems) == (0, {})
    assert f"{run.run_dir.name}: no tensors were captured" in printed
    assert "quick_analysis.png" in files(tmp_path / "draw")


def test_statistics_without_values_are_reported(run: Unhashed, draws: Draw) -> None:
    for line in run.lines:
        line["file"] = None
    run.write()
    for path in run.dir.rglob("*.pt"):
        path.unlink()
    _, _, printed = draws(run.run_dir, only=("heatmaps",))
    assert "statistics of 6 tensors, no values: heatmaps and attention_maps are left out" in printed


def test_an_unknown_part_is_refused(run: Unhashed, draws: Draw) -> None:
    message = "--only must be of quick_analysis, distributions, heatmaps, statistics.*, got colours"
    with pytest.raises(ConfigError, match=message):
        draws(run.run_dir, only=("heatmaps", "colours"))


def test_a_folder_that_cannot_be_written_is_refused(
    run: Unhashed, draws: Draw, tmp_path: Path
) -> None:
    (tmp_path / "draw").write_text("a file")
    with pytest.raises(CaptureError, match=r"cannot be written: .*; give another with out=FOLDER"):
        draws(run.run_dir, only=("statistics",))


def count(entry: CapturedTensor) -> int:
    return entry.torch().numel()


def chapter(calls: list[int]) -> Chapter:
    """A chapter that counts elements."""

    def drawn(sources: list[Source], desk: Desk) -> list[Path]:
        entries = [entry for source in sources for entry in source.entries]
        total = sum(number for _, number in desk.each(count, entries))
        calls.append(total)
        desk.say(f"{total} elements")
        text = desk.write_text("total.json", json.dumps(total))
        return [text, *desk.save(new_figure(2, 1), "by/layer")]

    return Chapter("comparisons", "elements in all", drawn)  # type: ignore[arg-type]


def test_chapters_are_drawn_once_while_nothing_changes(
    run: Unhashed, draws: Draw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(verb, "_chapters", lambda wanted: [chapter(calls)])
    outcome, _, printed = draws(run.run_dir, only=("comparisons",))
    assert "comparisons: " in printed
    assert files(tmp_path / "draw") == {"comparisons/total.json", "comparisons/by/layer.png"}
    assert (outcome.num_files, len(calls)) == (2, 1)
    assert draws(run.run_dir, only=("comparisons",))[0].num_files == 2
    assert len(calls) == 1
    draws(run.run_dir, only=("comparisons",), filters={"layer": "0"})
    draws(run.run_dir, only=("comparisons",), force=True)
    (tmp_path / "draw/comparisons/total.json").unlink()
    draws(run.run_dir, only=("comparisons",), force=False)
    assert len(calls) == 4
    assert calls[0] == calls[2] == 2 * calls[1]


def test_a_chapter_names_unreadable_files_and_is_drawn_again(
    run: Unhashed, draws: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(verb, "_chapters", lambda wanted: [chapter(calls)])
    (run.dir / run.lines[0]["file"]).write_bytes(b"torn")
    for _ in range(2):
        outcome, complaints, _ = draws(run.run_dir, only=("comparisons",))
        assert len(outcome.problems) == len(complaints) == 1
    assert len(calls) == 2


def test_the_parts_are_named_after_their_chapters() -> None:
    assert tuple(chapter.folder for chapter in verb._chapters(PARTS)) == CHAPTER_FOLDERS
    assert PARTS[-len(CHAPTER_FOLDERS) :] == CHAPTER_FOLDERS


def test_statistics_alone_need_no_matplotlib(run: Unhashed, tmp_path: Path) -> None:
    words = ["draw", str(run.run_dir), f"out={tmp_path / 'o'}", *("--only", "statistics")]
    code = (
        "import sys; from quantexp.cli.main import main\n"
        f"assert main({[*words, '--jobs', '1']}) == 0\n"
        "print('matplotlib' in sys.modules)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.splitlines()[-1] == "False"
    assert (tmp_path / "o" / "statistics" / "statistics.csv").is_file()
