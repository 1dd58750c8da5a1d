from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from quantexp.capture import open_capture
from quantexp.capture.statistics.errors import quantisation_error
from quantexp.cli.arguments import parser_of
from quantexp.cli.main import main
from quantexp.extras.requantise.arguments import Request, request_of, words_of
from quantexp.extras.requantise.candidates import candidates, formats_of
from quantexp.extras.requantise.files import COLUMNS
from quantexp.extras.requantise.recommend import Choice
from quantexp.extras.requantise.requantising import Outcome, requantise
from quantexp.extras.requantise.table import _by_worth
from quantexp.formats import resolve
from quantexp.quant.sites import FPROP_X

from .conftest import Write, attention, linear, normal

Captured = pytest.CaptureFixture[str]
FEW = ("--formats", "mxfp4,mxfp6_e2m3")
OUTPUTS = (
    "requantise.csv",
    "requantise.json",
    "scale_exponent.csv",
    "scale_exponent.svg",
    "quant/recommended.yaml",
)


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "requantise.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def refused(capsys: Captured, *words: str) -> str:
    """The one line of a user's error."""
    assert main(["requantise", *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_run_is_scored_and_a_scheme_recommended(write: Write, capsys: Captured) -> None:
    run = write({**linear(0), **linear(1), **attention(0)}).parent
    assert main(["requantise", str(run), *FEW]) == 0
    text = capsys.readouterr().out
    out = run / "requantise"
    assert all((out / name).is_file() for name in OUTPUTS)
    assert not list(out.glob(".*"))
    for words in (
        "linear.wgrad.g",
        "pv.dgrad_v.P",
        "SQNR in dB",
        "scored       11 files, 65536 elements of each",
    ):
        assert words in text
    # Everything is normally distributed, so E2M3 (31 dB) is the cheapest that reaches 25 dB; dS was not captured.
    assert "recommended  at 25 dB: 16 of 18 slots quantised, 7.33 bits an element" in text
    rules = yaml.safe_load((out / "quant" / "recommended.yaml").read_text())["rules"]
    assert {rule["format"] for rule in rules} == {"mxfp6_e2m3"}
    assert len(rules) == 6 + 10


def test_every_score_is_a_row(write: Write) -> None:
    run = write({**linear(0), **linear(1)}).parent
    assert main(["requantise", str(run), *FEW]) == 0
    table = rows(run / "requantise")
    count = len(candidates(formats_of(["mxfp4", "mxfp6_e2m3"])))
    assert len(table) == 2 * 6 * count
    assert tuple(table[0]) == COLUMNS
    row = next(
        r
        for r in table
        if (r["layer"], r["product"], r["operand"], r["format"])
        == ("1", "wgrad", "x", "mxfp4_e2m1")
        and (r["scale_rule"], r["rounding"], r["hadamard"]) == ("ceil", "away", "")
    )
    (entry,) = open_capture(run).select(layer=1, tensor="input")
    expected = quantisation_error(
        entry.torch(), resolve("mxfp4", scale_rule="ceil", rounding="away"), 0
    )
    got = [float(row[key]) for key in expected._fields]
    assert got == list(expected)
    assert (row["axis"], row["bits"], row["elements"]) == ("tokens", "4.25", "8192")


def test_json_is_all_that_is_printed(write: Write, capsys: Captured) -> None:
    run = write({**linear(0), ("fc2", "input", 0): torch.zeros(64, 2, 32)}).parent
    assert (
        main(["requantise", str(run), "--formats", "mxfp4,nvfp4", "--sqnr", "19.5", "--json"]) == 0
    )
    content = json.loads(capsys.readouterr().out)
    assert content == json.loads((run / "requantise" / "requantise.json").read_text())
    assert (content["files"], content["sqnr_db"], content["problems"]) == (4, 19.5, [])
    by_slot = {(one["module"], one["slot"]): one for one in content["slots"]}
    x = by_slot["fc1", "linear.fprop.x"]
    assert (x["recommended"]["format"], x["recommended"]["bits"]) == ("nvfp4_e2m1", 4.5)
    assert x["formats"]["mxfp4_e2m1"]["sqnr_db"] < 19.5 < x["formats"]["nvfp4_e2m1"]["sqnr_db"]
    assert x["formats"]["nvfp4_e2m1"]["tensor"] == "L0 fc1 forward input"
    # Zeros have no SQNR, and nothing is recommended for them.
    zeros = by_slot["fc2", "linear.wgrad.x"]
    assert zeros["formats"]["mxfp4_e2m1"]["sqnr_db"] is None
    assert zeros["recommended"] == {"format": "bf16", "bits": 16.0, "sqnr_db": None}


def test_a_lossless_tensor_has_an_infinite_sqnr(write: Write) -> None:
    run = write({("fc1", "input", 0): torch.ones(64, 2, 32)}).parent
    assert main(["requantise", str(run), "--formats", "mxfp4"]) == 0
    content = json.loads((run / "requantise" / "requantise.json").read_text())
    assert content["slots"][0]["formats"]["mxfp4_e2m1"]["sqnr_db"] == "inf"
    assert content["slots"][0]["recommended"]["format"] == "mxfp4_e2m1"


def test_the_same_capture_gives_the_same_files_whatever_the_threads(
    write: Write, tmp_path: Path
) -> None:
    run = write({**linear(0), **attention(0)}).parent
    for out, jobs in (("one", "1"), ("three", "3")):
        words = ["--jobs", jobs, "--elements", "1024", "--out", str(tmp_path / out)]
        assert main(["requantise", str(run), "--formats", "mxfp4,hifp8", *words]) == 0
    for name in OUTPUTS:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "three" / name).read_bytes()


def test_the_study_has_the_medians_of_every_operand(write: Write) -> None:
    """At the offset 0 of mxfp4 that is the floor rule's own score."""
    run = write({**linear(0), **linear(1)}).parent
    assert main(["requantise", str(run), "--formats", "mxfp4"]) == 0
    with (run / "requantise" / "scale_exponent.csv").open(newline="") as stream:
        points = list(csv.DictReader(stream))
    assert len(points) == 3 * 11
    row = next(r for r in points if (r["operand"], r["exponent"]) == ("g", "0"))
    assert (row["format"], row["scale"], row["tensors"]) == ("mxfp4_e2m1", "block offset", "4")
    floor = [
        float(r["sqnr_db"])
        for r in rows(run / "requantise")
        if (r["operand"], r["scale_rule"], r["rounding"], r["pre_scale"], r["hadamard"])
        == ("g", "floor", "even", "", "")
    ]
    middle = sorted(floor)[1:3]
    assert math.isclose(float(row["sqnr_db"]), sum(middle) / 2, rel_tol=1e-12)


def test_weights_are_read_whole_where_blocks_have_several_rows(
    write: Write, capsys: Captured
) -> None:
    run = write(linear(0)).parent
    assert main(["requantise", str(run), "--formats", "fp8_128x128"]) == 0
    assert "65536 elements of each operand at most, weights whole\n" in capsys.readouterr().out


def test_formats_whose_scales_cannot_be_moved_have_no_study(write: Write) -> None:
    run = write(linear(0)).parent
    assert main(["requantise", str(run), "--formats", "fp8_1x128,mxfp4"]) == 0
    assert (run / "requantise" / "scale_exponent.png").is_file()
    assert main(["requantise", str(run), "--formats", "fp8_1x128"]) == 0
    assert not list((run / "requantise").glob("scale_exponent.??g"))
    assert len((run / "requantise" / "scale_exponent.csv").read_text().splitlines()) == 1
    assert {row["format"] for row in rows(run / "requantise")} == {"fp8_1x128"}


def test_files_that_cannot_be_read_are_named_and_the_rest_is_scored(
    write: Write, capsys: Captured
) -> None:
    folder = write({**linear(0), **linear(1)})
    truncated = folder / "bf16" / "0_fc1_input.pt"
    truncated.write_bytes(truncated.read_bytes()[:1000])
    torch.save({"tensor": torch.ones(3)}, folder / "bf16" / "notes.pt")
    assert main(["requantise", str(folder), *FEW]) == 1
    output = capsys.readouterr()
    first, second, last = output.err.splitlines()
    assert f"{truncated} is refused: it is no file of captured values, is damaged" in first
    assert second == (
        f"quantexp: {folder}/bf16/notes.pt is none of the captured tensors: neither listed nor named as one"
    )
    assert last == "quantexp: 2 files could not be used, they are named above"
    assert "scored       5 files, " in output.out
    content = json.loads((folder / "requantise" / "requantise.json").read_text())
    assert [one["file"] for one in content["problems"]] == ["bf16/0_fc1_input.pt", "bf16/notes.pt"]


def test_an_unknown_layout_is_named_with_its_file(write: Write, capsys: Captured) -> None:
    run = write({**linear(0), ("attention", "query", 0): normal(64, 2, 64)}).parent
    assert main(["requantise", str(run), *FEW]) == 1
    assert capsys.readouterr().err.splitlines()[0] == (
        "quantexp: bf16/3_attention_query.pt: must be [tokens, sequences, heads, head_dim] as captured, got the "
        "shape [64, 2, 64]"
    )


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        (None, "mxfp4"),
        ("quant: {name: FA_linear_mxfp4}", "FA_linear_mxfp4"),
        ("quant: [", "mxfp4"),
        ("quant: {name: bf16}", None),
    ],
)
def test_a_quantised_trajectory_is_named(
    write: Write, capsys: Captured, config: str | None, scheme: str | None
) -> None:
    run = write({("fc1", "input", 0): normal(32, 1, 32)}, quant_type="mxfp4").parent
    if config is not None:
        (run / "config.yaml").write_text(config)
    assert main(["requantise", str(run), "--formats", "mxfp4"]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    words = "values are those before quantisation, but of a training that was quantised"
    assert notes == ([] if scheme is None else [f"note         captured under {scheme}: {words}"])


def test_old_collections_are_scored_by_their_names(tmp_path: Path, capsys: Captured) -> None:
    """Names with a layer and a module, with a layer alone, and with neither."""
    folder = tmp_path / "old"
    (folder / "bf16").mkdir(parents=True)
    names = {
        "20250908_095220_0001_attention_L0_forward_pre_FA_bf16_query": normal(64, 1, 2, 32),
        "20250908_095220_0002_linear_L0-fc1_forward_pre_linear_bf16_input": normal(64, 1, 64),
        "20250908_095220_0003_linear_forward_bf16_weight": normal(64, 64),
        "20250908_092156_0004_attention_L0_forward_hifp8_key": normal(64, 1, 2, 32),
    }
    for name, x in names.items():
        torch.save({"tensor": x, "metadata": {}}, folder / "bf16" / f"{name}.pt")
    assert main(["requantise", str(folder), *FEW, "--elements", "0"]) == 0
    table = rows(folder / "requantise")
    assert {row["module"] for row in table} == {"attention", "fc1", "linear"}
    rules = yaml.safe_load((folder / "requantise/quant/recommended.yaml").read_text())["rules"]
    named = [rule.get("modules") for rule in rules]
    assert named == [*[["attention"]] * 4, ["fc1"], ["fc1"], None, None]
    text = capsys.readouterr().out
    assert "scored       4 files, all elements\n" in text
    out = folder / "requantise"
    assert f"\nquantexp --config-dir {out} quant=recommended ...\n" in f"\n{text}".replace(
        "train with   ", ""
    )


@pytest.mark.parametrize(
    "words",
    [
        ["a"],
        ["a", "layer=0", "--formats", "mxfp4", "--sqnr", "20.5", "--elements", "0", "--jobs", "2"],
        ["a", "--out", "b"],
    ],
)
def test_the_words_of_a_request_are_that_request(words: list[str]) -> None:
    parser = parser_of("requantise")
    request = request_of(parser.parse_intermixed_args(words))
    assert request_of(parser.parse_intermixed_args(words_of(request))) == request


def test_words_select_by_metadata(write: Write) -> None:
    run = write({**linear(0), **linear(1)}).parent
    assert main(["requantise", str(run), *FEW, "layer=1", "tensor=grad_*"]) == 0
    assert {(r["layer"], r["tensor"]) for r in rows(run / "requantise")} == {("1", "grad_output")}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["layer=7"], r"layer=7: no captured tensor fits; `quantexp captures` lists what there is"),
        (["colour=red"], r"colour must be a key of the metadata, one of bytes, .*"),
        (["layer"], r"a selection must be key=pattern, such as tensor=grad_\*, got 'layer'"),
        (
            ["tensor=output"],
            r"none of these tensors is an operand of a matrix product; those are input, .*",
        ),
        (["--formats", "fp3"], r"--formats must be among bfloat16, .*, got 'fp3'"),
        (["--elements", "-1"], r"--elements must be at least 0 \(0 is all\), got -1"),
        (["--jobs", "0"], r"--jobs must be at least 1, got 0"),
        (["--sqnr", "nan"], r"--sqnr must be a finite number of dB, got nan"),
    ],
)
def test_an_impossible_request_is_refused_in_one_line(
    write: Write, capsys: Captured, words: list[str], message: str
) -> None:
    run = write({**linear(0), ("fc1", "output", 0): normal(4, 1, 4)}).parent
    assert re.fullmatch(f"quantexp: .*{message}", refused(capsys, str(run), *words))
    assert not (run / "requantise").exists()


def test_folders_without_tensors_are_refused(
    write: Write, capsys: Captured, tmp_path: Path
) -> None:
    assert "there is no run, sweep or folder" in refused(capsys, str(tmp_path / "none"))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no captured tensors: neither a manifest.jsonl nor" in refused(capsys, str(empty))
    line = {"layer": 0, "layer_type": "linear", "tensor": "input", "file": None}
    (empty / "manifest.jsonl").write_text(json.dumps(line) + "\n")
    assert "only statistics were kept, no values to quantise; run with capture=tensors" in refused(
        capsys, str(empty)
    )


def test_a_capture_of_unreadable_files_is_refused_after_their_names(
    write: Write, capsys: Captured
) -> None:
    folder = write({("fc1", "input", 0): normal(64, 2, 32)})
    (folder / "bf16" / "0_fc1_input.pt").write_bytes(b"")
    assert main(["requantise", str(folder)]) == 1
    named, last = capsys.readouterr().err.splitlines()
    assert "0_fc1_input.pt is refused" in named
    assert last == f"quantexp: {folder}: none of 1 files could be scored: see above"


def test_a_place_that_cannot_be_written_is_refused(
    write: Write, capsys: Captured, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    line = refused(capsys, str(write(linear())), "--out", str(tmp_path / "file" / "out"), *FEW)
    assert line == (
        f"quantexp: {tmp_path}/file/out cannot be written: Not a directory; give another with --out"
    )


def test_an_interrupt_leaves_no_half_file(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quantexp.extras.requantise.tally.Tally.add", interrupted)
    assert main(["requantise", str(write(linear())), *FEW, "--out", str(tmp_path / "out")]) == 130
    assert list((tmp_path / "out").iterdir()) == []


def test_a_terminal_shows_the_progress(write: Write, tmp_path: Path) -> None:
    stream = io.StringIO()
    terminal = Console(file=stream, force_terminal=True, width=80)
    request = Request(str(write(linear())), [], "mxfp4", out=tmp_path / "out")
    requantise(request, terminal, pytest.fail)
    assert "requantising" in stream.getvalue()
    assert "3/3" in stream.getvalue()


def printed(outcome: Outcome, width: int) -> list[str]:
    out = io.StringIO()
    outcome.print(Console(file=out, width=width))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_narrow_table_leaves_out_formats_and_breaks_no_word(write: Write, tmp_path: Path) -> None:
    request = Request(str(write(linear(0))), [], out=tmp_path / "a folder", num_elements=64)
    outcome = requantise(request, Console(quiet=True), pytest.fail)
    wide = printed(outcome, 160)
    assert not any("No room" in line for line in wide)
    words = {word for line in wide for word in line.split()}
    for width in (80, 100):
        lines = printed(outcome, width)
        command = f"quantexp --config-dir '{tmp_path / 'a folder'}' quant=recommended ..."
        assert lines[-1].removeprefix("train with   ") == command
        assert all(len(line) <= width for line in lines[:-1])
        (start,) = (i for i, line in enumerate(lines) if line.startswith(f"No room in {width}"))
        first = {word for line in lines[:start] for word in line.split()}
        assert first <= words
        assert "recommended" in first
        for quantised in {one.candidate.format.name for one in outcome.choices if one.candidate}:
            assert {*quantised.split("_")} <= {*lines[0].split(), *lines[1].split()}


def test_the_formats_of_the_schemes_go_last_of_those_that_are_not_recommended() -> None:
    formats = formats_of(None)
    ranked = [fmt.name for fmt in _by_worth([], formats)]
    assert ranked[-3:] == ["hifp8", "mxfp4_e2m1", "mxfp8_e4m3"]
    chosen = next(one for one in candidates(formats) if one.format.name == "fp8_e5m2")
    choice = Choice("fc1", FPROP_X, chosen, None, captured=True)
    assert _by_worth([choice], formats)[-1] is chosen.format


def test_many_notes_are_counted(write: Write, capsys: Captured) -> None:
    """Sampled rows have no whole blocks along tokens, so none of their slots along tokens is scored."""
    folder = write({("fc1", "input", layer): normal(2, 1, 32, seed=layer) for layer in range(7)})
    lines = [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]
    sample = {"of": "rows", "axis": 0, "indices": [1, 5], "shape": [64, 1, 32]}
    text = "".join(json.dumps({**line, "sample": sample}) + "\n" for line in lines)
    (folder / "manifest.jsonl").write_text(text)
    assert main(["requantise", str(folder), "--formats", "mxfp4"]) == 0
    output = capsys.readouterr().out
    assert output.count("blocks along tokens are not whole") == 5
    assert "... and 2 more notes in requantise.json" in output
    content = json.loads((folder / "requantise" / "requantise.json").read_text())
    assert len(content["notes"]) == 7
    assert [one["slot"] for one in content["slots"]] == ["linear.fprop.x"]
