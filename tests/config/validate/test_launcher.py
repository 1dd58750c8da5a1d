"""Every refusal of a layout or of a line break, by its message; and the values that quoting makes harmless."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from quantexp.config.compose import compose
from quantexp.config.validate.parallel import validate_launcher
from quantexp.errors import ConfigError
from quantexp.schema import Experiment


@pytest.fixture(scope="module")
def local() -> Experiment:
    return compose(["training=fast"], None, {})


@pytest.fixture(scope="module")
def slurm() -> Experiment:
    return compose(["training=fast", "launcher=slurm"], None, {})


def changed(experiment: Experiment, **keys: Any) -> Experiment:
    experiment = copy.deepcopy(experiment)
    for key, value in keys.items():
        setattr(experiment.launcher, key, value)
    return experiment


def refusal(experiment: Experiment, **keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        validate_launcher(changed(experiment, **keys))
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "least"),
    [
        ("num_processes", 0),
        ("nodes", 1),
        ("num_threads", 1),
        ("max_parallel", 1),
        ("time_min", 1),
        ("max_requeue", 0),
        ("signal_s", 1),
        ("cpus_per_process", 1),
    ],
)
def test_number_below_its_least_is_refused(slurm: Experiment, key: str, least: int) -> None:
    words = refusal(slurm, **{key: least - 1})
    assert words == f"launcher.{key} must be at least {least}, got {least - 1}"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("timeout_min", 0, "must be a positive number"),
        ("mem_gb", -1, "must be a number of at least 0"),
    ],
)
def test_amount_below_its_least_is_refused(
    slurm: Experiment, key: str, value: int, words: str
) -> None:
    assert refusal(slurm, **{key: value}) == f"launcher.{key} {words}, got {value}"


@pytest.mark.parametrize(
    ("key", "value"), [("partition", "gpu"), ("time_min", 5), ("environment", {"A": "b"})]
)
def test_local_run_refuses_keys_of_slurm(local: Experiment, key: str, value: object) -> None:
    assert refusal(local, **{key: value}) == (
        f"launcher.{key}={value} is for SLURM and has no effect under launcher.kind=local; "
        "add launcher=slurm, or drop it"
    )


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"num_processes": 2, "nodes": 2},
            "training.global_batch_size must be a multiple of training.micro_batch_size x launcher.num_processes = "
            "2 x 2 = 4, got 2",
        ),
        (
            {"detach": True},
            "launcher.detach=true is for runs of this machine: a job is never waited for",
        ),
        ({"gpu_type": "h100"}, "launcher.gpu_type=h100 needs launcher.gpus_per_node of at least 1"),
    ],
)
def test_impossible_combination_is_refused(
    slurm: Experiment, keys: dict[str, Any], words: str
) -> None:
    assert refusal(slurm, **keys).startswith(words)


@pytest.fixture
def four(slurm: Experiment) -> Experiment:
    """Four processes that share a batch."""
    experiment = changed(slurm, num_processes=4, nodes=2)
    experiment.training.micro_batch_size, experiment.training.global_batch_size = 1, 4
    return experiment


def test_layout_that_divides_evenly_passes(four: Experiment) -> None:
    for gpus in (0, 2):
        validate_launcher(changed(four, gpus_per_node=gpus))


def test_layout_that_does_not_match_the_ranks_is_refused(four: Experiment) -> None:
    assert refusal(four, nodes=3) == (
        "launcher.num_processes must be a multiple of launcher.nodes=3, got 4; take "
        "launcher.num_processes=6"
    )
    for gpus in (1, 3, 4):
        assert refusal(four, gpus_per_node=gpus) == (
            "launcher.gpus_per_node must be 0 (CPU) or 2, a GPU for each of a node's processes "
            f"(launcher.num_processes=4 over launcher.nodes=2), got {gpus}"
        )


LINES = (
    *("partition", "account", "qos", "gpu_type", "constraint", "exclude", "nodelist"),
    *("reservation", "mail_user", "mail_type", "container", "python"),
)


@pytest.mark.parametrize("key", LINES)
@pytest.mark.parametrize("value", ["", "a\n#SBATCH --uid=0", "a\rb", "a\0b"])
def test_line_break_in_an_option_is_refused(slurm: Experiment, key: str, value: str) -> None:
    keys = {"gpus_per_node": 1, "python": "python3", "container": "a.sif", key: value}
    words = refusal(slurm, **keys)
    assert words == f"launcher.{key} must be one line of printable characters, got {value!r}"


@pytest.mark.parametrize("key", ["modules", "container_mounts", "srun_args"])
def test_line_break_in_a_list_is_refused(slurm: Experiment, key: str) -> None:
    keys = {"python": "python3", "container": "a.sif", key: ["fine", "a\nb"]}
    assert re.fullmatch(
        rf"launcher\.{key} must be one line of printable characters, got 'a\\nb'",
        refusal(slurm, **keys),
    )


def test_line_break_in_a_further_option_is_refused(slurm: Experiment) -> None:
    assert refusal(slurm, sbatch={"comment": "a\nb"}) == (
        "launcher.sbatch.comment must be one line of printable characters, got 'a\\nb'"
    )


def test_quoted_value_may_have_any_character(slurm: Experiment) -> None:
    nasty = "a 'b' \"c\" $(id) `id` ; & | > \\ # é"
    validate_launcher(
        changed(
            slurm,
            partition=nasty,
            constraint="a&b|c*2",
            environment={"NASTY": f"{nasty}\n#SBATCH --uid=0\n"},
            modules=[nasty],
            setup=["if true\nthen true\nfi"],
            sbatch={"comment": nasty},
        )
    )
