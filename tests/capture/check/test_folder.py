"""The report of `captures --check` for each kind of damage, with file and line."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantexp.capture.check.folder import check
from quantexp.cli.main import main
from quantexp.errors import CaptureError
from quantexp.schema import StoreKind
from tests.hostile.captured import write_capture


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_capture(tmp_path / "tensors", StoreKind.pt)
    return tmp_path / "tensors"


def edit(name: str, number: int, **more: Any) -> Callable[[Path], None]:
    """Change values in one line of a list."""

    def damage(folder: Path) -> None:
        lines = (folder / name).read_text().splitlines()
        lines[number - 1] = json.dumps({**json.loads(lines[number - 1]), **more})
        (folder / name).write_text("".join(f"{line}\n" for line in lines))

    return damage


def text(name: str, number: int, line: str) -> Callable[[Path], None]:
    """Replace one line of a list."""

    def damage(folder: Path) -> None:
        lines = (folder / name).read_text().splitlines(keepends=True)
        lines[number - 1] = line
        (folder / name).write_text("".join(lines))

    return damage


def write(name: str, content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


def edit_file(file: Path, **more: Any) -> None:
    torch.save({**torch.load(file, weights_only=True), **more}, file)


def change_file(folder: Path, **more: Any) -> None:
    """Change the content of the second tensor's file."""
    edit_file(sorted(folder.glob("mxfp8/*_0002_*.pt"))[0], **more)


def resave(folder: Path, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Store another view of the values in place of those of the second line."""
    file = sorted(folder.glob("mxfp8/*_0002_*.pt"))[0]
    content = torch.load(file)
    torch.save({**content, "tensor": view(content["tensor"])}, file)


def without_rank_1(folder: Path) -> None:
    for file in folder.glob("*.jsonl"):
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if '"rank":0' in line))


def to_fifo(name: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return damage


MANIFEST, STATISTICS = "manifest.jsonl", "statistics.jsonl"


@pytest.mark.parametrize(
    ("damage", "file", "line", "words"),
    [
        (text(MANIFEST, 2, '{"broken\n'), MANIFEST, 2, "it cannot be read: "),
        (text(MANIFEST, 2, "[" * 9999 + "\n"), MANIFEST, 2, "it cannot be read: "),
        (text(MANIFEST, 2, "\n"), MANIFEST, 2, "it is empty"),
        (text(STATISTICS, 16, '{"cut'), STATISTICS, 16, "it is cut off"),
        (text(MANIFEST, 2, ""), MANIFEST, None, r"hen the run ended: 19 lines .*, 20 and \d+ were"),
        (edit(MANIFEST, 1, rank=5), MANIFEST, None, "it has no line of rank 2, of 6 ranks"),
        (without_rank_1, MANIFEST, None, "it has no line of rank 1, of 2 ranks"),
        (edit(MANIFEST, 6, iteration=0), MANIFEST, 6, "out of order: iteration 0 after 1"),
        (edit(MANIFEST, 1, layer=3), MANIFEST, 1, "the metadata in the file differs in layer"),
        (edit(MANIFEST, 1, layer=3), MANIFEST, 1, "statistics.jsonl has no line of this tensor"),
        (edit(MANIFEST, 1, dtype="float16"), MANIFEST, 1, "float16, that of the values bfloat16"),
        (
            edit(MANIFEST, 1, shape=[64, 4]),
            MANIFEST,
            1,
            r"is \[64, 4\], that of the values \[4, 64",
        ),
        (edit(MANIFEST, 1, bytes=7), MANIFEST, 1, "its bytes is 7, that of the values 512"),
        (edit(MANIFEST, 1, quant_type="mxfp4"), MANIFEST, 1, "its name is another tensor's"),
        (edit(MANIFEST, 2, slot="qk.q"), MANIFEST, 2, "its slot qk.q is none of its formats"),
        (edit(MANIFEST, 2, dim=2), MANIFEST, 2, r"its dim 2 is not an axis of its shape \[4, 64\]"),
        (edit(MANIFEST, 5, layer=3), MANIFEST, 5, "differs from the first line of its file in lay"),
        (edit(MANIFEST, 1, statistics={}), MANIFEST, 1, "statistics differs from line 1 of stat"),
        (edit(MANIFEST, 1, file="../x.pt"), MANIFEST, 1, "names ../x.pt, which is outside the fol"),
        (edit(MANIFEST, 1, file="a\0"), MANIFEST, 1, "which is no file's name"),
        (edit(STATISTICS, 2, tensor="input"), STATISTICS, 2, "it repeats line 1 of statistics.jso"),
        (lambda f: (f / STATISTICS).unlink(), STATISTICS, None, "missing, and hashes.json has its"),
        (lambda f: (f / "hashes.json").unlink(), "hashes.json", None, "is missing"),
        (
            edit(MANIFEST, 1, rank=10**11),
            MANIFEST,
            None,
            "it has no line of rank 2, of 100000000001 ",
        ),
        (edit(MANIFEST, 1, rank=-5), MANIFEST, 1, "rank must be a whole number from 0, got -5"),
        (edit(MANIFEST, 1, file=["x"]), MANIFEST, 1, "it cannot be read: file must be"),
        (to_fifo(STATISTICS), STATISTICS, None, "must be a file, and is a FIFO"),
        (write("hashes.json", "{}"), MANIFEST, None, "hashes.json has no hash of it"),
        (
            write("report.json", "[]"),
            "report.json",
            None,
            "it must be keys with values, got a list",
        ),
        (write("report.json", "{"), "report.json", None, "line 1: "),
        (write("report.json", '{"files": 3}'), "report.json", None, "files is 3, the manifest has"),
        (text(MANIFEST, 2, "{}\n"), MANIFEST, 2, "it names no tensor"),
        (
            write("report.json", '{"by_layer": {"0": {"tensors": 3}}}'),
            "report.json",
            None,
            r"by_layer\.0\.tensors is 3, the manifest has \d+; \d+ more of by_layer differ",
        ),
        (write("mxfp8/more.pt", ""), "mxfp8/more.pt", None, "no line names it"),
        (write("mxfp8/x.pt.part", ""), "mxfp8/x.pt.part", None, "a temporary file that its writer"),
        (write(".report.json.7", ""), ".report.json.7", None, "a temporary file that its writer"),
        (lambda f: change_file(f, tensor=torch.ones(4, 64)), MANIFEST, 2, "other values than the"),
        (
            lambda f: change_file(f, tensor=torch.ones(4, 64, dtype=torch.bfloat16)),
            MANIFEST,
            2,
            "its statistics differ from those of its values in nan|min",
        ),
        (lambda f: change_file(f, metadata={"a": 1j}), MANIFEST, 2, "metadata is not plain data"),
        (
            lambda f: change_file(f, tensor=torch.eye(3).to_sparse()),
            MANIFEST,
            2,
            "no plain numbers, got torch.float32, torch.sparse_coo$",
        ),
        (
            lambda f: change_file(f, tensor=torch.ones(4, dtype=torch.complex64).conj()),
            MANIFEST,
            2,
            "no plain numbers, got torch.complex64, torch.strided$",
        ),
        (
            lambda f: change_file(f, tensor=torch.ones(4, device="meta")),
            MANIFEST,
            2,
            "no plain numbers, got torch.float32, torch.strided on meta$",
        ),
        (
            lambda f: resave(f, torch._neg_view),
            MANIFEST,
            2,
            "other values than the manifest's hash",
        ),
    ],
)
def test_each_difference_is_named_with_its_place(
    folder: Path, damage: Callable[[Path], object], file: str, line: int | None, words: str
) -> None:
    damage(folder)
    problems = check(folder, num_ranks=2).problems
    at_place = [each.what for each in problems if (each.file, each.line) == (file, line)]
    assert any(re.search(words, what) for what in at_place), problems


@pytest.mark.parametrize(
    "view",
    [
        lambda x: torch._neg_view(-x),
        lambda x: torch._neg_view(-torch.stack([x, x], -1))[..., 0],
        lambda x: torch._neg_view((-x).t().contiguous()).t(),
        lambda x: torch.nn.Parameter(x),
    ],
    ids=["negated", "negated and strided", "negated and transposed", "parameter"],
)
def test_a_lazy_view_of_the_same_values_is_intact(
    folder: Path, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    resave(folder, view)
    checked = check(folder)
    assert (checked.num_intact, checked.problems) == (checked.num_tensors, [])


def test_a_member_that_only_a_whole_read_notices_is_named(folder: Path) -> None:
    """The checksum of the values in the archive, which memory-mapped reading skips."""
    file = sorted(folder.glob("mxfp8/*_0002_*.pt"))[0]
    content = bytearray(file.read_bytes())
    entry = (
        content.rindex(b"/data/0")
        - content[: content.rindex(b"/data/0")][::-1].index(b"\2\1KP")
        - 4
    )
    content[entry + 16] ^= 1
    file.write_bytes(content)
    whats = [each.what for each in check(folder).problems if each.line == 2]
    assert len(whats) == 1
    assert whats[0].startswith("its archive is damaged in ")


def test_lines_that_are_swapped_are_out_of_order(folder: Path) -> None:
    for name, words in ((MANIFEST, "file number 0 after 2"), (STATISTICS, "has its tensor")):
        lines = (folder / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join([lines[1], lines[0], *lines[2:]]))
        assert any(words in each.what for each in check(folder).problems)
        (folder / name).write_text("".join(lines))


def test_shards_their_header_and_their_index_are_compared(tmp_path: Path) -> None:
    write_capture(tmp_path, StoreKind.safetensors)
    assert not check(tmp_path).problems
    index = tmp_path / "capture.safetensors.index.json"
    content = json.loads(index.read_text())
    index.write_text(json.dumps({**content, "metadata": {"total_size": 1}}))
    edit(MANIFEST, 1, offsets=[8, 520])(tmp_path)
    edit(MANIFEST, 2, key="other")(tmp_path)
    (tmp_path / "shards" / "rank1-00001.safetensors").write_bytes(b"")
    whats = [each.what for each in check(tmp_path).problems]
    for words in (
        "it differs from the manifest: weight_map or total_size",
        "the header of its shard differs in offsets",
        "shards/rank0-00001.safetensors has no tensor other",
        "no line names its tensor mxfp8/20250908_095220_0002",
        "is not a complete safetensors file: its header does not fit into it",
        "its shard shards/rank1-00001.safetensors cannot be read",
    ):
        assert any(words in what for what in whats), words
    (tmp_path / "shards" / "rank1-00001.safetensors").unlink()
    assert any("rank1-00001.safetensors is missing" in p.what for p in check(tmp_path).problems)


def test_a_selection_limits_the_values_that_are_read_not_the_lists(folder: Path) -> None:
    change_file(folder, tensor=torch.ones(4, 64))
    checked = check(folder, {"rank": 1})
    assert (checked.num_tensors, checked.num_intact, checked.num_lines) == (8, 8, 36)
    assert not checked.problems
    assert check(folder, {"rank": 0}).problems


def test_an_empty_folder_has_nothing_to_check(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"holds no captured tensors; run with capture=tensors"):
        check(tmp_path)


def test_a_killed_run_has_no_hashes_of_its_lists(tmp_path: Path) -> None:
    write_capture(tmp_path, StoreKind.pt, ranks=1, end=False)
    checked = check(tmp_path)
    assert not checked.problems
    assert checked.summary().endswith("; there is no hashes.json to check the lists by")
    assert [each.file for each in check(tmp_path, is_complete=True).problems] == ["report.json"]


def test_the_verb_prints_a_line_for_each_problem_and_ends_with_1(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text(MANIFEST, 2, '{"broken\n')(folder)
    assert main(["captures", str(folder), "--check"]) == 1
    output = capsys.readouterr()
    first = "manifest.jsonl, line 2: it cannot be read: unexpected control character in string"
    assert output.out.splitlines()[0] == first
    assert re.search(r"15 of 15 tensors .*; 36 lines, 20 files, \d+ problems\n$", output.err)
    assert main(["captures", str(folder), "--check", "--json"]) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    what = "it cannot be read: unexpected control character in string"
    assert problems[0] == {"file": "manifest.jsonl", "line": 2, "what": what}


@pytest.fixture
def unlisted(folder: Path) -> Path:
    """A folder of the files of one format without lists, as `capture.layout=by_type` links them."""
    return (folder / "mxfp8").rename(folder.parent / "mxfp8")


def test_files_without_a_list_are_compared_with_their_own_metadata(unlisted: Path) -> None:
    checked = check(unlisted)
    assert (checked.num_tensors, checked.num_intact, checked.problems) == (16, 0, [])
    assert checked.summary().endswith(
        "; there is no manifest.jsonl: each file is compared with its own metadata"
    )
    assert check(unlisted, {"tensor": "weight"}).num_tensors == 4


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: file.rename(f"{file}".replace("input", "weight")), "its name is that of an"),
        (lambda file: os.truncate(file, 100), "is refused: it is no file of captured values"),
        (lambda file: edit_file(file, tensor=torch.ones(4, 64)), "its dtype is bfloat16, that of"),
        (lambda file: edit_file(file, tensor=torch.ones(4, 64).bfloat16()), "its statistics diff"),
    ],
)
def test_damage_of_a_file_without_a_list_is_named(
    unlisted: Path, damage: Callable[[Path], object], words: str
) -> None:
    damage(next(unlisted.glob("*_0000_*.pt")))
    assert any(words in problem.what for problem in check(unlisted).problems)


def test_files_of_older_scripts_have_only_archives_to_be_checked(tmp_path: Path) -> None:
    name = "20250908_095220_0001_attention_L3_forward_pre_FA_mxfp8_query.pt"
    metadata = {"shape": torch.Size([4]), "dtype": "torch.float32", "layer_idx": 3}
    torch.save({"tensor": torch.ones(4), "metadata": metadata}, tmp_path / name)
    assert check(tmp_path).problems == []


def test_readers_warn_once_about_unreadable_lines(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from quantexp.capture import open_capture

    text(MANIFEST, 3, '{"broken\n')(folder)
    for _ in range(2):
        assert len(open_capture(folder)) == 19
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}/manifest.jsonl: 1 of its lines cannot be read and are left out, the first: line 3: "
        "unexpected control character in string; "
        f"quantexp captures {folder} --check shows the damage"
    ]
