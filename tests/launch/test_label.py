"""Runs of a sweep are labelled by what they do not have in common."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quantexp.launch.label import labels
from quantexp.schema import Experiment, LrSchedule


@pytest.fixture
def make(tiny: Callable[..., Experiment]) -> Callable[..., Experiment]:
    """An experiment with a seed and the name of a scheme."""

    def make(seed: int = 1, *, scheme: str = "bf16") -> Experiment:
        experiment = tiny()
        experiment.training.seed, experiment.quant.name = seed, scheme
        return experiment

    return make


def test_runs_that_differ_in_the_scheme_alone_are_labelled_by_it(
    make: Callable[..., Experiment],
) -> None:
    assert labels([make(scheme="bf16"), make(scheme="FA_mxfp8")]) == ["bf16", "FA_mxfp8"]
    assert labels([make()]) == ["bf16"]


def test_model_and_dataset_are_named_where_they_differ(make: Callable[..., Experiment]) -> None:
    one, other = make(), make()
    other.dataset.name = "dolma"
    assert labels([one, other]) == ["wikipedia bf16", "dolma bf16"]


def test_runs_of_one_name_are_labelled_by_the_keys_that_differ(
    make: Callable[..., Experiment],
) -> None:
    experiments = [make(1), make(2), make(2, scheme="FA_mxfp8")]
    assert labels(experiments) == ["bf16 seed=1", "bf16 seed=2", "FA_mxfp8"]
    experiments[1].training.lr_schedule = LrSchedule.constant
    assert labels(experiments) == [
        "bf16 lr_schedule=cosine seed=1",
        "bf16 lr_schedule=constant seed=2",
        "FA_mxfp8",
    ]


def test_preset_is_named_and_not_all_its_keys(make: Callable[..., Experiment]) -> None:
    experiments = [make(1), make(2), make(2)]
    experiments[2].training.name = "default"
    experiments[2].training.seq_length = 4096
    assert labels(experiments) == [
        "bf16 training=fast seed=1",
        "bf16 training=fast seed=2",
        "bf16 training=default seed=2",
    ]


def test_keys_that_follow_from_the_data_are_not_named(make: Callable[..., Experiment]) -> None:
    experiments = [make(), make()]
    experiments[1].dataset.path, experiments[1].dataset.sample = "/data/wiki", False
    experiments[1].model.vocab_size = 1000
    assert labels(experiments) == ["bf16 path=None", "bf16 path=/data/wiki"]


def test_equal_experiments_have_equal_labels(make: Callable[..., Experiment]) -> None:
    assert labels([make(), make()]) == ["bf16", "bf16"]


def test_layouts_of_one_experiment_are_told_apart(tiny: Callable[..., Experiment]) -> None:
    layouts = [
        tiny("training.global_batch_size=4", "launcher.num_processes=2", f"parallel.tensor={size}")
        for size in (1, 2)
    ]
    assert labels(layouts) == ["bf16 tensor=1", "bf16 tensor=2"]
    auto = tiny()
    auto.parallel.name = "other"
    assert labels([tiny(), auto]) == ["bf16 parallel=none", "bf16 parallel=other"]
