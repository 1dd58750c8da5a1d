from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest
from rich.console import Console

from quantexp.analysis.compare.arguments import named_runs, out_and_rest
from quantexp.analysis.compare.comparison import compare
from quantexp.analysis.compare.side import read_side
from quantexp.analysis.compare.table import print_comparison
from quantexp.analysis.compare.verdicts import judge
from quantexp.cli.main import main
from quantexp.errors import ConfigError
from quantexp.runs.paths import RunDir

from .runs import Runs, change_json


def test_compare_prints_and_draws(
    runs: Runs, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.add()
    runs.add("FA_linear_mxfp8", [6.0, 5.5, 4.0, 3.75], seed=7)
    assert main(["compare", "runs", "out=mine"]) == 0
    printed = capsys.readouterr().out
    assert "not a matched pair" in printed
    assert "no gap can be told from noise" in printed
    assert "+0.2500" in printed
    assert "mxfp8_e4m3 32 rceil even" in printed
    assert "mine/compare.png mine/compare.pdf" in printed
    picture = matplotlib.image.imread(in_tmp / "mine" / "compare.png")
    assert len({tuple(p) for p in picture.reshape(-1, picture.shape[-1])[::7]}) > 20
    assert (in_tmp / "mine" / "compare.pdf").read_bytes().startswith(b"%PDF")
    assert not list(in_tmp.rglob("*.part"))


def test_json_writes_no_figure_by_default(
    runs: Runs, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.add()
    quantised = runs.add("FA_mxfp8")
    assert main(["compare", quantised.root.name, "bf16", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [run["scheme"] for run in content["runs"]] == ["FA_mxfp8", "bf16"]
    assert [path.name for path in in_tmp.iterdir()] == ["runs"]


def test_a_sweeps_list_names_its_runs_and_those_that_never_started(
    runs: Runs, in_tmp: Path
) -> None:
    run = runs.add()
    listing = in_tmp / "runs" / "sweeps" / "1.json"
    listing.parent.mkdir()
    lost = {"run": None, "reason": "no data", "config": {"quant": {"name": "mxfp4"}}}
    listing.write_text(json.dumps({"runs": [{"run": run.root.name}, lost]}))
    selection = named_runs([str(listing), str(run.root)], in_tmp / "runs")
    assert [r.root.name for r in selection.runs] == [run.root.name]
    assert [gone.reason for gone in selection.missing] == ["did not start: no data"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_nothing_is_cut_in_a_narrow_terminal(runs: Runs, width: int) -> None:
    sides = [read_side(runs.add()), read_side(runs.add("FA_linear_mxfp8", lr=1.0))]
    console = Console(width=width, record=True, highlight=False, file=io.StringIO())
    print_comparison(compared := compare(sides), judge(compared), console)
    text = console.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert "training.lr" in text.replace("\n", "")
    if width >= 80:
        for line in (
            "one seed for each scheme: no gap can be told from noise, whatever its size",
            "gap: loss above bf16 in the last iteration that both have",
            "late gap: its mean over the last tenth (1 iteration)",
        ):
            assert line in text, "in one piece"


@pytest.mark.parametrize("width", [40, 80])
def test_the_command_for_a_baseline_stays_on_a_line(runs: Runs, width: int) -> None:
    run = runs.add("FA_mxfp8")
    words = ["quantexp", "model=llama32-1b", "training=fast", "paths.root=/runs of mine", "seed=1"]
    change_json(run.provenance, command=words)
    console = Console(width=width, record=True, highlight=False, file=io.StringIO())
    print_comparison(compared := compare([read_side(run)]), judge(compared), console)
    command = "quantexp model=llama32-1b training=fast 'paths.root=/runs of mine' seed=1 quant=bf16"
    assert command in console.export_text()


def test_names_are_not_read_as_markup(runs: Runs) -> None:
    sides = [read_side(runs.add()), read_side(runs.add("[red]x"))]
    console = Console(width=120, record=True, file=io.StringIO())
    print_comparison(compared := compare(sides), judge(compared), console)
    assert "[red]x" in console.export_text()


def test_out_needs_a_path() -> None:
    assert out_and_rest(["a", "out=b"]) == (Path("b"), ["a"])
    assert out_and_rest(["a"]) == (None, ["a"])
    with pytest.raises(ConfigError, match="out must be a path, got nothing; give out=PATH"):
        out_and_rest(["out="])


def test_compare_without_runs_is_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["compare", "out=x"])
    assert ended.value.code == 2
    assert "compare takes runs: RUN ..." in capsys.readouterr().err


def test_a_missing_run_is_reported_in_one_line(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "nowhere"]) == 1
    assert capsys.readouterr().err == (
        "quantexp: there is no run, sweep or folder nowhere, and no run in runs has that in its name; see quantexp "
        "list runs\n"
    )


def test_a_mistyped_run_is_answered_with_the_closest_name(
    runs: Runs, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.add("FA_mxfp8", name="llama32-1b_wikipedia_FA_mxfp8-1a2b3c4d")
    assert main(["compare", "FA_mxpf8-1a2b3c4d"]) == 1
    assert "; did you mean FA_mxfp8-1a2b3c4d? see" in capsys.readouterr().err


def test_json_needs_neither_torch_nor_matplotlib(runs: Runs, in_tmp: Path) -> None:
    runs.add()
    code = (
        "import sys; from quantexp.cli.main import main; assert main(['compare', 'runs', '--json']) == 0; "
        "assert not {'torch', 'matplotlib', 'megatron'} & set(sys.modules)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr


def test_the_footer_explains_only_the_columns_of_the_table(runs: Runs) -> None:
    compared = compare([read_side(runs.add())])
    console = Console(file=io.StringIO(), width=50)
    print_comparison(compared, judge(compared), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.splitlines()[0].strip() == "1 run"
    assert "late gap" not in text
    assert "tokens/s" not in text


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_tables_fit_every_width_without_a_broken_word(runs: Runs, width: int) -> None:
    sides = [read_side(runs.add()), read_side(runs.add("FA_linear_mxfp8", [6.0, 5.5, 4.0, 3.75]))]
    console = Console(file=io.StringIO(), width=width)
    print_comparison(compared := compare(sides), judge(compared), console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert all(len(line.rstrip()) <= width for line in lines)
    words = " ".join(lines).split()
    for word in ("FA_linear_mxfp8", "baseline", "completed", "+0.2500", "mxfp8_e4m3", "fprop.w"):
        assert any(word == each.strip(",()") for each in words), word
    assert ("memory" in lines[1]) == (width >= 100)


def three_seeds(runs: Runs) -> None:
    for seed in (1, 2, 3):
        runs.add(losses=[6.0, 5.0, 4.0, 3.5 + seed / 1e6], seed=seed)
        runs.add("FA_mxfp8", [6.0, 5.0, 4.0, 3.6 + seed / 100], seed=seed)
        runs.add("linear_mxfp4", [6.0, 5.0, 4.0, 3.4 + seed / 10], seed=seed)
    runs.add(losses=[6.0, 5.0, 4.0, 3.51], seed=1, chaos=1)
    runs.add(losses=[6.0, 5.0, 4.0, 3.48], seed=2, chaos=1)


def test_a_scheme_without_a_usable_seed_has_a_row_that_says_why(runs: Runs) -> None:
    three_seeds(runs)
    for seed in (1, 2, 3):
        runs.add("linear_nan", [None] * 4, seed=seed)
    console = Console(file=io.StringIO(), width=160)
    compared = compare([read_side(RunDir(folder)) for folder in sorted(runs.root.iterdir())])
    print_comparison(compared, judge(compared), console)
    assert isinstance(console.file, io.StringIO)
    text = " ".join(console.file.getvalue().split())
    assert "linear_nan 0 - - - - no seed to judge" in text
    assert "linear_nan: 3 of 3 seeds left out (not finite)" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_verdicts_fit_every_width_and_say_what_chance_does(runs: Runs, width: int) -> None:
    three_seeds(runs)
    folders = sorted(runs.root.iterdir())
    console = Console(file=io.StringIO(), width=width)
    compared = compare([read_side(RunDir(folder)) for folder in folders])
    print_comparison(compared, judge(compared), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    assert "gap to bf16: mean loss of iterations 4 to 4" in text
    assert "above bf16" in text
    assert "+0.1200" in text
    assert "by last bits of the initial weights (2 runs)" in text
    assert "by the seed (3 bf16 runs)" in text
    assert ("corrected for 2 schemes (Holm)" in text) == (width >= 80)
    lines = [line.rstrip() for line in text.partition("gap to bf16: mean")[2].splitlines()[2:4]]
    assert [line.split()[0] for line in lines] == ["FA_mxfp8", "linear_mxfp4"]
    assert lines[1].endswith("  cannot be told"), "in one line"
    assert "\nlinear_mxfp4: would need about 7 seeds" in text


def test_the_figure_has_a_row_for_each_interval(
    runs: Runs, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    three_seeds(runs)
    assert main(["compare", "runs", "out=mine", "--json"]) == 0
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    assert [each["label"] for each in verdicts["schemes"]] == ["FA_mxfp8", "linear_mxfp4"]
    assert verdicts["floors"][0]["num_chaos"] == 2
    with_forest = matplotlib.image.imread(in_tmp / "mine" / "compare.png").shape[0]
    assert main(["compare", "FA_mxfp8-00000001", "out=other", "--json"]) == 0
    assert matplotlib.image.imread(in_tmp / "other" / "compare.png").shape[0] < with_forest


def test_another_measure_or_scheme_may_be_held_against(
    runs: Runs, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    three_seeds(runs)
    assert main(["compare", "runs", "--json", "against=FA_mxfp8", "window=2"]) == 0
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    mxfp4 = next(each for each in verdicts["schemes"] if each["label"] == "linear_mxfp4")
    assert mxfp4["window"] == [3, 4]
    assert mxfp4["gaps"] == pytest.approx([-0.055, -0.01, 0.035])


@pytest.mark.parametrize(
    ("measure", "remedy"),
    [
        ("validation_loss", "evaluation.every=N records it after every N iterations"),
        ("perplexity", "evaluation.every=N records it after every N iterations"),
        ("grad_norm", "a training records it in every iteration"),
    ],
)
def test_a_measure_that_no_run_has_recorded_is_an_error(
    runs: Runs, in_tmp: Path, capsys: pytest.CaptureFixture[str], measure: str, remedy: str
) -> None:
    runs.add()
    assert main(["compare", "runs", f"measure={measure}"]) == 1
    assert capsys.readouterr().err == (
        f"quantexp: measure={measure}: no run has recorded it; {remedy}\n"
    )


def test_runs_without_the_measure_are_named_and_the_losses_on_the_way_are_called_so(
    runs: Runs,
) -> None:
    base, quantised = runs.add(), runs.add("FA_mxfp8")
    line = {"iteration": 5, "loss": 3.0, "perplexity": 20.0}
    with base.metrics.open("a") as file:
        file.write(json.dumps(line) + "\n")
    compared = compare([read_side(run, "perplexity") for run in (base, quantised)])
    assert "FA_mxfp8 has recorded no perplexity" in compared.warnings
    console = Console(file=io.StringIO(), width=80)
    print_comparison(compared, judge(compared), console)
    assert isinstance(console.file, io.StringIO)
    assert "loss gap to bf16 on the way, by iteration" in " ".join(console.file.getvalue().split())


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "measure=speed",
            "measure must be one of loss, validation_loss, unquantised_loss, perplexity, grad_norm, got speed",
        ),
        ("window=0", "window must be a number of iterations, at least 1, got 0"),
        ("window=", "window must be a number of iterations, at least 1, got nothing"),
        ("against=", "against must be a scheme, got nothing; give against=SCHEME"),
    ],
)
def test_words_about_verdicts_are_checked(
    runs: Runs, in_tmp: Path, capsys: pytest.CaptureFixture[str], word: str, message: str
) -> None:
    runs.add()
    assert main(["compare", "runs", word]) == 1
    assert message in capsys.readouterr().err
