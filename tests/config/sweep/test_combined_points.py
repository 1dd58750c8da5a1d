"""Points that are excluded, first, merged, or added as a baseline."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantexp.config.compose import compose
from quantexp.config.sweep.points import compose_points, merged_lines
from quantexp.folders import conf_dir

from .composed import points, refusal, schemes


@pytest.mark.slow
def test_excluded_points_are_left_out() -> None:
    exclude = "sweep.exclude=[{quant: 'FA_*'}, {quant: '*hifp8', dataset: dolma}]"
    sweep = points("dataset=wikipedia,dolma", "quant=glob(*)", exclude)
    assert [(p.experiment.dataset.name, p.experiment.quant.name) for p in sweep] == [
        ("wikipedia", "bf16"),
        ("wikipedia", "linear_hifp8"),
        ("wikipedia", "linear_mxfp4"),
        ("wikipedia", "linear_mxfp8"),
        ("dolma", "bf16"),
        ("dolma", "linear_mxfp4"),
        ("dolma", "linear_mxfp8"),
    ]


def test_invalid_point_may_be_excluded() -> None:
    words = ["quant=linear_mxfp8,linear_hifp8", "quant.linear.block=16"]
    assert refusal(*words).startswith(
        "quant.linear.block does not apply to hifp8, got 16; remove it"
    )
    assert schemes(*words, "sweep.exclude={quant: linear_hifp8}") == [
        points(*words, "sweep.exclude={quant: linear_hifp8}")[0].experiment.quant.name
    ]


def test_exclusion_that_matches_nothing_is_a_typo() -> None:
    message = refusal("quant=bf16,FA_mxfp8", "sweep.exclude={quant: linear*}")
    assert message == (
        "sweep.exclude: {'quant': 'linear*'} matches no point (of 2); quant is bf16, FA_mxfp8"
    )


def test_excluding_everything_is_refused() -> None:
    message = refusal("quant=bf16,FA_mxfp8", "sweep.exclude={quant: '*'}")
    assert message == "sweep.exclude leaves no point (of 2)"


def test_first_points_are_stage_0_and_come_first() -> None:
    words = ["training.seed=1,2", "quant=FA_mxfp8,bf16,linear_mxfp8"]
    sweep = points(*words, "sweep.first={quant: bf16}")
    assert [(p.stage, p.experiment.training.seed, p.experiment.quant.name) for p in sweep] == [
        (0, 1, "bf16"),
        (0, 2, "bf16"),
        (1, 1, "FA_mxfp8"),
        (1, 1, "linear_mxfp8"),
        (1, 2, "FA_mxfp8"),
        (1, 2, "linear_mxfp8"),
    ]
    assert {p.stage for p in points(*words)} == {0}, "without sweep.first nothing waits"


def test_first_that_matches_only_excluded_points_is_a_typo() -> None:
    message = refusal(
        "quant=bf16,FA_mxfp8", "sweep.exclude={quant: bf16}", "sweep.first={quant: bf16}"
    )
    assert message.startswith(
        "sweep.first: {'quant': 'bf16'} matches no point (of 1); quant is FA_mxfp8"
    )


def test_points_of_the_same_experiment_are_merged_with_a_message() -> None:
    sweep = points("quant=bf16,FA_mxfp8", "quant/qk=none,mxfp8")
    assert [p.experiment.quant.name for p in sweep] == ["bf16", "FA_mxfp8"]
    assert [p.merged for p in sweep] == [
        [["quant=FA_mxfp8", "quant/qk=none"]],
        [["quant=FA_mxfp8", "quant/qk=mxfp8"]],
    ]
    assert merged_lines(sweep) == [
        "quant=FA_mxfp8 is the same experiment as quant=bf16: it runs once",
        "quant=FA_mxfp8 is the same experiment as quant=bf16: it runs once",
    ]


def test_repeated_value_is_merged_with_a_message() -> None:
    sweep = points("training.lr=1e-4,1.0e-4", "quant=bf16", "+experiment=matched")
    (first, *_) = merged_lines(sweep)
    assert first == (
        "training.lr=0.0001 quant=bf16 +experiment=matched is there more than once: it runs once"
    )


def test_merged_point_has_the_earliest_stage(own: Path) -> None:
    (own / "training").mkdir()
    text = (conf_dir() / "training" / "default.yaml").read_text()
    (own / "training" / "same.yaml").write_text(text)
    (point,) = points("training=default,same", "sweep.first={training: same}", config_dir=own)
    assert point.stage == 0
    assert len(point.merged) == 1


def test_bf16_runs_beside_every_point_and_again_from_perturbed_weights() -> None:
    words = ["quant=FA_mxfp8,linear_mxfp4", "quant.rules=[]", "training.seed=1,2", "training=fast"]
    points = compose_points([*words, "+experiment=matched", "sweep.chaos=1"])
    shown = [
        (p.stage, p.experiment.quant.name, p.experiment.training.seed, p.experiment.training.chaos)
        for p in points
    ]
    baselines = [(0, "bf16", seed, chaos) for chaos in (0, 1) for seed in (1, 2)]
    schemes = [(1, name, seed, 0) for name in ("FA_mxfp8", "linear_mxfp4") for seed in (1, 2)]
    assert shown == baselines + schemes
    for point in points:
        assert compose(point.overrides, None, {}) == point.experiment


def test_a_bf16_point_of_the_sweep_is_its_own_baseline() -> None:
    points = compose_points(["quant=bf16,FA_mxfp8", "training=fast", "sweep.chaos=0"])
    assert [point.experiment.quant.name for point in points] == ["bf16", "FA_mxfp8"]
    assert merged_lines(points) == []
