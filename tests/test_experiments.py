"""The table of the shipped experiments: its rules, and that the page, its table and the files belong together."""

from __future__ import annotations

from pathlib import Path

import experiments
import pytest
import yaml
from omegaconf import OmegaConf

from quantexp.analysis.compare.side import read_side
from quantexp.analysis.compare.verdicts import Verdict
from quantexp.folders import conf_dir
from quantexp.runs.evaluation import write_evaluation
from quantexp.runs.paths import RunDir
from tests.analysis.compare.runs import Runs

PAGE = Path(__file__).parent.parent / "docs" / "experiments.md"


def verdict(
    mean: float, half: float, words: str = "cannot be told (would need about 9 seeds)"
) -> Verdict:
    """Of three seeds at a loss of 3: 0.5% of it is 0.015."""
    interval = (mean - half, mean + half)
    return Verdict(
        "scheme", "bf16", (1, 2, 3), (mean,) * 3, (181, 200), mean, mean / 3, interval, words=words
    )


@pytest.mark.parametrize(
    ("mean", "half", "words", "outcome"),
    [
        (0.01, 0.004, "above bf16", "reproduced"),
        (-0.01, 0.006, "cannot be told", "not resolved at this size"),
        (0.03, 0.01, "above bf16", "refuted"),
        (-0.03, 0.01, "below bf16", "refuted"),
        (0.01, 0.04, "inside the chaos floor", "reproduced"),
        (0.01, 0.04, "cannot be told", "not resolved at this size"),
    ],
)
def test_near_is_within_half_a_percent(mean: float, half: float, words: str, outcome: str) -> None:
    assert experiments.is_near(verdict(mean, half, words)) == outcome


@pytest.mark.parametrize(
    ("words", "above", "below"),
    [
        ("above bf16", "reproduced", "refuted"),
        ("below bf16", "refuted", "reproduced"),
        ("inside the chaos floor", "not resolved at this size", "not resolved at this size"),
        ("cannot be told", "not resolved at this size", "not resolved at this size"),
    ],
)
def test_order_is_what_the_verdict_says(words: str, above: str, below: str) -> None:
    assert experiments.is_above(verdict(0.1, 0.2, words)) == above
    assert experiments.is_below(verdict(0.1, 0.2, words)) == below


@pytest.mark.parametrize(
    ("outcomes", "end"),
    [
        (["reproduced", "reproduced"], "reproduced"),
        (["reproduced", "refuted"], "refuted"),
        (["reproduced", "not resolved at this size"], "not resolved at this size"),
    ],
)
def test_all_questions_decide(outcomes: list[str], end: str) -> None:
    assert experiments.overall(outcomes) == end


def test_evaluations_are_judged_one_number_for_each_model(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "runs")
    losses = {"linear_mxfp4": 0.5, "linear_mxfp6": 0.1, "linear_mxfp8": 0.01}
    for seed in (1, 2, 3):
        for scheme, gap in losses.items():
            name = f"tiny_synthetic_{scheme}_evaluated-{seed}{len(scheme):07x}{int(gap * 100):x}"
            run = runs.add(scheme, [3.0], name=name, start_from=f"bf16-{seed}@600")
            config = yaml.safe_load(run.config.read_text()) | {"evaluate": {"only": True}}
            run.config.write_text(yaml.safe_dump(config))
            bf16, gap_here = 3.0 + seed / 100, gap * (1 + seed / 1000)
            one = {"tokens": 9, "documents": 9, "loss": bf16 + gap_here, "bf16_loss": bf16}
            write_evaluation(run, one | {"difference": gap_here}, [], [])
    sides = [read_side(RunDir(folder)) for folder in sorted(runs.root.iterdir())]
    (shipped,) = (each for each in experiments.EXPERIMENTS if each.is_evaluated)
    answers = experiments.judged(sides, shipped)
    assert [round(answer.verdict.mean, 3) for answer in answers] == [0.501, -0.401, -0.491]
    words = [answer.verdict.words.split()[0] for answer in answers]
    assert words == ["above", "below", "below"]
    assert experiments.judged(sides[1:], shipped) == [], "a model without one of the schemes"
    lines = [line for line in experiments.table(sides).splitlines() if "direct_cast" in line]
    assert lines[0].endswith("**reproduced** |")


def test_high_rates_are_those_of_the_file_and_the_page() -> None:
    high = [each for each in experiments.EXPERIMENTS if each.has_high_rate]
    for each in high:
        file = OmegaConf.load(conf_dir() / "experiment" / f"{each.name}.yaml")
        full = OmegaConf.load(conf_dir() / "size" / "full.yaml").training.lr * 8
        assert pytest.approx((file.training.lr, full)) == experiments.HIGH_RATES
        assert (
            f"training.lr={experiments.HIGH_RATES[1]:.1e}".replace("e-03", "e-3")
            in sections()[each.name]
        )
    assert [each.name for each in high] == ["mx_instability"]


def sections() -> dict[str, str]:
    """The sections of the page by their headings, those of experiments by their names."""
    return dict(text.split("\n", 1) for text in PAGE.read_text().split("\n## ")[1:])


def test_each_experiment_has_a_file_a_section_and_a_line_of_the_table() -> None:
    names = {each.name for each in experiments.EXPERIMENTS}
    assert names == {f.stem for f in (conf_dir() / "experiment").glob("*.yaml")} - {
        "matched",
        "ten_schemes",
    }
    assert names == sections().keys() - {"Results at `small`", "Claims decided on checkpoints"}
    table = PAGE.read_text().split(experiments.BEGIN)[1].split(experiments.END)[0]
    assert all(f"(#{name})" in table for name in names)
    for name in names:
        parts = ("**Claim.**", "**Design.**", "**What decides.**", "**Result")
        places = [sections()[name].find(part) for part in parts]
        assert -1 not in places, name
        assert places == sorted(places), name


def test_table_is_written_from_the_runs_and_says_which_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Runs(tmp_path / "runs")
    schemes = {
        "linear_mxfp8": 0.001,
        "linear_mxfp8_floor": 0.1,
        "linear_fp8_e4m3": 0.0,
        **dict.fromkeys(("linear_mxfp4", "linear_mxfp4_backward", "linear_mxfp4_wgrad"), 0.2),
        **dict.fromkeys(("linear_mxfp4_fprop", "linear_mxfp4_dgrad", "linear_mxfp4_sr_rht"), 0.1),
    }
    folders = []
    for seed in (1, 2, 3):
        loss, noise = 3.0 + seed / 100, 0.0001 * seed
        folders.append(runs.add("bf16", [loss] * 20, seed=seed, iterations=20))
        folders.append(runs.add("bf16", [loss + noise] * 20, seed=seed, iterations=20, chaos=1))
        for scheme, gap in schemes.items():
            losses = [loss + gap * (1 + noise) + noise] * 20
            folders.append(runs.add(scheme, losses, seed=seed, iterations=20))
    sides = [read_side(folder) for folder in folders]
    assert experiments.table(sides).count("not run yet") == 3, (
        "of hifp8, the high rate, evaluations"
    )
    high = Runs(tmp_path / "unstable")
    remedied = dict.fromkeys(("linear_mxfp8_floor_fprop", "linear_mxfp8_floor_weights"), 0.1)
    for seed in (1, 2, 3):
        loss = 3.1 + 0.0001 * seed
        runs.add("linear_hifp8", [loss] * 20, seed=seed, iterations=20)
        for scheme, gap in {"bf16": 0.0, "linear_mxfp8_floor": 2.0, **remedied}.items():
            losses = [loss + gap * (1 + 0.0001 * seed)] * 20
            high.add(scheme, losses, seed=seed, iterations=20, lr=1.6e-2)
    page = tmp_path / "experiments.md"
    page.write_text(f"before\n{experiments.BEGIN}\nold\n{experiments.END}\nafter\n")
    monkeypatch.setattr(experiments, "PAGE", page)
    experiments.main([str(runs.root), str(high.root), "--write"])
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "old" not in lines
    ends = [line.rpartition("| ")[2] for line in lines if line.startswith("| [")]
    assert ends == ["**reproduced** |"] * 4 + ["**refuted** |", "**reproduced** |", "|"]
