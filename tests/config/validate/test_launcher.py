"""Every refusal of a layout or of a request to SLURM, by its words; and what quoting makes harmless."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from quantexp.config.compose import compose
from quantexp.config.validate.launcher import validate_launcher
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
        ("num_processes", 1),
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


@pytest.mark.parametrize("key", ["timeout_min", "mem_gb"])
def test_amount_must_be_positive(slurm: Experiment, key: str) -> None:
    assert refusal(slurm, **{key: 0}) == f"launcher.{key} must be a positive number, got 0"


@pytest.mark.parametrize(
    ("key", "value"), [("partition", "gpu"), ("time_min", 5), ("environment", {"A": "b"})]
)
def test_local_run_refuses_what_only_slurm_would_do(
    local: Experiment, key: str, value: object
) -> None:
    assert refusal(local, **{key: value}) == (
        f"launcher.{key}={value} is for SLURM and would do nothing here; add launcher=slurm, or drop it"
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
        ({"container_mounts": ["/a:/b"]}, "launcher.container_mounts needs launcher.container"),
        (
            {"container": "a.sif"},
            "launcher.container needs launcher.python, what starts Python inside it (python3)",
        ),
    ],
)
def test_combination_that_cannot_be_is_refused(
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
        "launcher.num_processes must be a multiple of launcher.nodes=3, got 4"
    )
    for gpus in (1, 3, 4):
        assert refusal(four, gpus_per_node=gpus) == (
            "launcher.gpus_per_node must be 0 (CPU) or 2, a GPU for each of a node's processes "
            f"(launcher.num_processes=4 over launcher.nodes=2), got {gpus}"
        )


@pytest.mark.parametrize("name", ["", "A B", "1A", "A-B", "A;id", "A$(id)", "A\n"])
def test_variable_that_is_no_name_is_refused(slurm: Experiment, name: str) -> None:
    assert refusal(slurm, environment={name: "x"}) == (
        f"launcher.environment must have names of letters, digits and _, got {name!r}"
    )


def test_variable_that_every_rank_is_given_is_refused(slurm: Experiment) -> None:
    assert refusal(slurm, environment={"MASTER_ADDR": "x"}) == (
        "launcher.environment.MASTER_ADDR cannot be set: quantexp needs it itself"
    )


@pytest.mark.parametrize("name", ["", "--hold", "a b", "a=b", "HOLD", "h\n#SBATCH --uid=0"])
def test_option_that_is_no_name_is_refused(slurm: Experiment, name: str) -> None:
    words = refusal(slurm, sbatch={name: "true"})
    assert words.startswith("launcher.sbatch must have sbatch's long option names without dashes")
    assert words.endswith(f"got {name!r}")


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("time", "5", "set launcher.time_min"),
        ("array", "0-9", "set launcher.max_parallel"),
        ("gpus-per-task", "1", "set launcher.gpus_per_node"),
        ("wait", "true", "quantexp needs it itself"),
        ("output", "x", "quantexp needs it itself"),
    ],
)
def test_option_that_quantexp_sets_is_refused_with_the_key_that_decides_it(
    slurm: Experiment, name: str, value: str, remedy: str
) -> None:
    words = refusal(slurm, sbatch={name: value})
    assert words == f"launcher.sbatch.{name} cannot be set: {remedy}"


def test_other_resources_may_be_asked_for_but_gpus_only_by_their_key(slurm: Experiment) -> None:
    validate_launcher(changed(slurm, sbatch={"gres": "nvme:1", "exclusive": "true"}))
    assert refusal(slurm, sbatch={"gres": "gpu:2"}) == (
        "launcher.sbatch.gres=gpu:2 cannot be set: set launcher.gpus_per_node"
    )


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ("--ntasks=1", "set launcher.num_processes"),
        ("-n2", "set launcher.num_processes"),
        ("--nodes=1", "set launcher.nodes"),
        ("-c", "set launcher.cpus_per_process"),
        ("--output=x", "quantexp needs it itself"),
    ],
)
def test_argument_of_srun_that_changes_the_layout_is_refused(
    slurm: Experiment, argument: str, remedy: str
) -> None:
    words = refusal(slurm, srun_args=[argument])
    assert words == f"launcher.srun_args={argument} cannot be set: {remedy}"
    validate_launcher(changed(slurm, srun_args=["--mpi=none", "--no-kill", "-v"]))


LINES = (
    *("partition", "account", "qos", "gpu_type", "constraint", "exclude", "nodelist"),
    *("reservation", "mail_user", "mail_type", "container", "python"),
)


@pytest.mark.parametrize("key", LINES)
@pytest.mark.parametrize("value", ["", "a\n#SBATCH --uid=0", "a\rb", "a\0b"])
def test_line_break_in_an_option_is_refused(slurm: Experiment, key: str, value: str) -> None:
    given = {"gpus_per_node": 1, "python": "python3", "container": "a.sif", key: value}
    words = refusal(slurm, **given)
    assert words == f"launcher.{key} must be one line of printable characters, got {value!r}"


@pytest.mark.parametrize("key", ["modules", "container_mounts", "srun_args"])
def test_line_break_in_a_list_is_refused(slurm: Experiment, key: str) -> None:
    given = {"python": "python3", "container": "a.sif", key: ["fine", "a\nb"]}
    assert re.fullmatch(
        rf"launcher\.{key} must be one line of printable characters, got 'a\\nb'",
        refusal(slurm, **given),
    )


def test_line_break_in_a_further_option_is_refused(slurm: Experiment) -> None:
    assert refusal(slurm, sbatch={"comment": "a\nb"}) == (
        "launcher.sbatch.comment must be one line of printable characters, got 'a\\nb'"
    )


def test_what_is_quoted_may_hold_anything(slurm: Experiment) -> None:
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
