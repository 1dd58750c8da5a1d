"""Every refused request to SLURM, by its message."""

from __future__ import annotations

from typing import Any

import pytest
from quantexp_launchers.slurm.launcher import SlurmLauncher

from quantexp.config.compose import compose
from quantexp.errors import ConfigError
from quantexp.schema import LauncherConfig

check = SlurmLauncher().check


def request(**keys: Any) -> LauncherConfig:
    return LauncherConfig(kind="slurm", **keys)


def refusal(**keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check(request(**keys))
    return str(caught.value)


def test_composing_an_experiment_checks_its_request() -> None:
    words = ["training=fast", "launcher=slurm", "+launcher.sbatch.wait=true"]
    with pytest.raises(ConfigError, match=r"launcher\.sbatch\.wait cannot be set"):
        compose(words, None, {})


def test_container_needs_its_python_and_mounts_need_a_container() -> None:
    assert refusal(container_mounts=["/a:/b"]) == (
        "launcher.container_mounts needs launcher.container"
    )
    assert refusal(container="a.sif") == (
        "launcher.container needs launcher.python, what starts Python inside it (python3)"
    )


@pytest.mark.parametrize("name", ["", "A B", "1A", "A-B", "A;id", "A$(id)", "A\n"])
def test_variable_that_is_no_name_is_refused(name: str) -> None:
    assert refusal(environment={name: "x"}) == (
        f"launcher.environment must have names of letters, digits and _, got {name!r}"
    )


def test_variable_that_quantexp_sets_for_every_rank_is_refused() -> None:
    assert refusal(environment={"MASTER_ADDR": "x"}) == (
        "launcher.environment.MASTER_ADDR cannot be set: quantexp needs it itself"
    )


@pytest.mark.parametrize("name", ["", "--hold", "a b", "a=b", "HOLD", "h\n#SBATCH --uid=0"])
def test_option_that_is_no_name_is_refused(name: str) -> None:
    words = refusal(sbatch={name: "true"})
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
def test_option_that_quantexp_sets_is_refused_with_the_key_that_determines_it(
    name: str, value: str, remedy: str
) -> None:
    words = refusal(sbatch={name: value})
    assert words == f"launcher.sbatch.{name} cannot be set: {remedy}"


def test_other_resources_may_be_requested_but_gpus_only_by_their_key() -> None:
    check(request(sbatch={"gres": "nvme:1", "exclusive": "true"}))
    assert refusal(sbatch={"gres": "gpu:2"}) == (
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
def test_argument_of_srun_that_changes_the_layout_is_refused(argument: str, remedy: str) -> None:
    words = refusal(srun_args=[argument])
    assert words == f"launcher.srun_args={argument} cannot be set: {remedy}"
    check(request(srun_args=["--mpi=none", "--no-kill", "-v"]))


@pytest.mark.parametrize("name", ["arr", "a", "tim", "ntask", "tasks", "outp", "export-f", "e"])
def test_abbreviation_of_an_option_of_quantexp_is_refused_as_that_option(name: str) -> None:
    assert refusal(sbatch={name: "1"}).startswith(f"launcher.sbatch.{name} cannot be set: ")


def test_option_that_is_longer_than_one_of_quantexp_is_another() -> None:
    check(request(sbatch={"mem-per-cpu": "2G", "time-min": "5", "wait-all-nodes": "1"}))


@pytest.mark.parametrize(
    "argument",
    ["--ntask=3", "--tasks=2", "--job=7", "--no=2", "-un4", "-vQN2", "-n", "-K0", "--he"],
)
def test_abbreviated_and_joined_options_of_srun_are_refused(argument: str) -> None:
    words = refusal(srun_args=[argument])
    assert words.startswith(f"launcher.srun_args={argument} cannot be set: ")


def test_value_of_an_option_of_srun_is_no_option() -> None:
    check(request(srun_args=["-pnode", "--hint=nomultithread", "-u", "label-n"]))


def test_gpus_are_refused_at_any_position_of_gres() -> None:
    assert refusal(sbatch={"gres": "nvme:1, gpu:2"}).endswith("set launcher.gpus_per_node")
