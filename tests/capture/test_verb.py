"""`quantexp captures`: counts, lists and checks."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from quantexp.cli.main import main

from .listed import statistics_line, value


def test_the_verb_counts_lists_and_filters(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["captures", str(folder), "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert (counts["listed"], counts["files"], counts["bytes"], counts["left_out"]) == (6, 4, 48, 1)
    assert counts["by_module"]["fc1"] == {
        "tensors": 4,
        "iterations": 3,
        "files": 3,
        "bytes": 36,
        "described_bytes": 0,
    }
    assert main(["captures", str(folder), "--list", "--json", "layer=0", "tensor=w*"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert main(["captures", str(folder)]) == 0
    assert "6 tensors in 4 files, 48 B, 1 left out" in capsys.readouterr().out
    assert main(["captures", str(folder), "--list"]) == 0
    assert "attention" in capsys.readouterr().out
    assert main(["captures", str(folder), "tensor"]) == 1
    assert "a selection must be key=pattern, such as tensor=grad_*, got" in capsys.readouterr().err


def test_the_verb_finds_a_file_that_changed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["captures", str(folder), "--check"]) == 0
    assert (
        "4 of 4 tensors have the values of the manifest's hash; 6 lines, 5 files; "
        in capsys.readouterr().out
    )
    torch.save({"tensor": value(9), "metadata": {}}, folder / "mxfp8/2.pt")
    (folder / "mxfp8/3.pt").unlink()
    assert main(["captures", str(folder), "--check"]) == 1
    output = capsys.readouterr()
    text = " ".join(output.out.split())
    assert "other values than the manifest's hash" in text
    assert "3.pt is missing although it is listed" in text
    assert "2 of 4 tensors have the values of the manifest's hash" in output.err


def test_the_verb_says_how_many_tensors_have_no_hash(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = folder / "manifest.jsonl"
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    lines[0]["hash"] = None
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["captures", str(folder), "--check"]) == 0
    summary = (
        "3 of 4 tensors have the values of the manifest's hash, 1 have no hash to be checked by"
    )
    assert summary in capsys.readouterr().out


def test_the_verb_says_which_hash_it_cannot_check(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = folder / "manifest.jsonl"
    manifest.write_text(manifest.read_text().replace("xxh3_128:", "md5:"))
    assert main(["captures", str(folder), "--check"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "a hash of the kind md5 cannot be checked here, only xxh3_128 and SHA-256" in printed


@pytest.fixture
def described(tmp_path: Path) -> Path:
    """The folder of a run with capture=stats: lines of statistics, and nothing else."""
    wide = {
        "layer_type": "linear",
        "quant_type": "mxfp8",
        "dtype": "bfloat16",
        "shape": [64, 2, 128],
    }
    numbers = {"abs_max": 3.656, "std": 0.988, "zero_share": 0.0125}
    lines = [
        statistics_line(**wide, layer=layer, iteration=iteration, statistics=numbers)
        for iteration in (1, 3)
        for layer in (0, 1)
    ]
    (tmp_path / "statistics.jsonl").write_text("".join(lines))
    return tmp_path


def test_the_verb_counts_statistics_without_values(
    described: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["captures", str(described)]) == 0
    printed = capsys.readouterr().out
    assert "statistics of 4 tensors, no values (capture=tensors would keep 131.1 kB)\n" in printed
    assert "iterations 1, 3\n" in printed
    assert re.search(r"layer +0 +2 +2 +65.5 kB *\n", printed)
    assert main(["captures", str(described), "--json", "layer=0"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert (counts["statistics_only"], counts["iterations"], counts["files"]) == (2, [1, 3], 0)
    assert counts["described_bytes"] == 2 * 64 * 2 * 128 * 2


def test_the_verb_lists_statistics_and_prints_shared_values_once(
    described: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["captures", str(described), "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("all: module fc1, operation forward, tensor input, shape 64x2x128,")
    assert next(line.split() for line in lines[1:] if line.strip()) == ["iteration", "layer"]
    assert ["3", "1"] in [line.split() for line in lines]


def test_a_narrow_terminal_drops_the_columns_of_least_worth(
    described: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("input", "grad_output_wgrad")
    numbers = {"abs_max": 3.656, "std": 0.988, "zero_share": 0.0125}
    lines = [
        statistics_line(tensor=name, layer=i, phase=name, shape=[i, 128, 64], statistics=numbers)
        for i, name in enumerate(names)
    ]
    numbers["std"] = numbers["abs_max"] = numbers["zero_share"] = 0.5
    lines.append(statistics_line(statistics=numbers))
    (described / "statistics.jsonl").write_text("".join(lines))
    for width, headings in (
        ("80", ["layer", "phase", "tensor", "shape", "amax", "std", "zeros"]),
        ("50", ["layer", "tensor", "shape", "amax", "std"]),
    ):
        monkeypatch.setenv("COLUMNS", width)
        assert main(["captures", str(described), "--list"]) == 0
        table = capsys.readouterr().out.splitlines()
        assert max(map(len, table)) <= int(width)
        assert headings in [line.split() for line in table]


def test_statistics_can_be_checked_but_not_exported(
    described: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["captures", str(described), "--check"]) == 0
    assert "; 4 lines, 1 files" in capsys.readouterr().out
    assert main(["captures", str(described), "--export", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert "has statistics of what is selected and no values: run with capture=tensors" in error
    assert not (tmp_path / "out").exists()


def test_the_verb_counts_statistics_beside_values(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "statistics.jsonl").write_text(
        statistics_line(iteration=7, shape=[4], dtype="float32")
    )
    assert main(["captures", str(folder)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "6 tensors in 4 files, 48 B, 1 left out, and statistics of 1 tensors without values (16 B)"
        in printed
    )


def test_many_iterations_are_counted_not_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [statistics_line(iteration=i) for i in range(1, 2001, 100)]
    (tmp_path / "statistics.jsonl").write_text("".join(lines))
    assert main(["captures", str(tmp_path)]) == 0
    assert "20 iterations, 1 to 1901\n" in capsys.readouterr().out


def test_a_part_of_a_runs_name_selects_its_capture(
    described: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("m_d_FA_mxfp8-00000001", "m_d_FA_mxfp4-00000002"):
        tensors = tmp_path / "elsewhere" / name / "tensors"
        tensors.mkdir(parents=True)
        shutil.copy(described / "statistics.jsonl", tensors)
        (tensors.parent / "config.yaml").write_text("{}")
    monkeypatch.chdir(tmp_path)
    root = "paths.root=elsewhere"
    assert main(["captures", "FA_mxfp8", root, "layer=0"]) == 0
    assert "m_d_FA_mxfp8-00000001" in capsys.readouterr().out
    for verb in ("captures", "draw", "requantise"):
        assert main([verb, "FA_mxfp", root]) == 1
        error = capsys.readouterr().err
        assert error == (
            "quantexp: RUN must be a part of one run's name, got 'FA_mxfp', which fits\n"
            "  m_d_FA_mxfp4-00000002\n  m_d_FA_mxfp8-00000001\n"
        )
