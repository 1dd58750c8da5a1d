"""What a backend lacks on the machine of a run; the machine is pretended."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quantexp.cli.main import main
from quantexp.errors import ConfigError
from quantexp.extras.transformer_engine.machine import used_recipes
from quantexp.extras.transformer_engine.scheme.hardware import Gpu
from quantexp.extras.transformer_engine.scheme.recipes import Kind, Recipe
from quantexp.launch.refusal import missing_for_backend, require_backend
from quantexp.schema import Experiment

Make = Callable[..., Experiment]
NATIVE = "quant.backend=transformer_engine"
H100, B200 = Gpu("NVIDIA H100", (9, 0), (12, 9)), Gpu("NVIDIA B200", (10, 0), (12, 9))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None, Gpu | None], None]:
    """Sets the version of Transformer Engine and the GPU of this machine."""

    def has(version: str | None, gpu: Gpu | None) -> None:
        monkeypatch.setattr(
            "quantexp.extras.transformer_engine.machine.installed_version", lambda: version
        )
        monkeypatch.setattr("quantexp.extras.transformer_engine.machine.this_gpu", lambda: gpu)

    return has


@pytest.mark.parametrize(
    ("version", "gpu", "message"),
    [
        (
            None,
            B200,
            "needs Transformer Engine, which is not installed: pip install 'quantexp[te]'",
        ),
        (
            "2.8.0",
            B200,
            "needs Transformer Engine 2.9 or newer, got 2.8.0; pip install 'quantexp[te]'",
        ),
        ("2.11.0", None, "needs an NVIDIA GPU, and this machine has none"),
        ("2.11.0", B200, None),
    ],
)
def test_what_this_machine_lacks_is_named(
    tiny: Make,
    machine: Callable[[str | None, Gpu | None], None],
    version: str | None,
    gpu: Gpu | None,
    message: str | None,
) -> None:
    machine(version, gpu)
    expected = None if message is None else f"{NATIVE} {message}"
    assert missing_for_backend(tiny("quant=linear_mxfp8", NATIVE)) == expected


def test_a_recipe_of_any_layer_or_iteration_counts(
    tiny: Make, machine: Callable[[str | None, Gpu | None], None]
) -> None:
    machine("2.11.0", H100)
    rules = "quant.rules=[{iterations: [2, null], layers: [1], sites: [linear], format: mxfp8}]"
    experiment = tiny("quant=more/te_fp8_current", rules)
    assert used_recipes(experiment) == [Recipe(Kind.CURRENT, hybrid=True), Recipe(Kind.MXFP8)]
    with pytest.raises(ConfigError) as caught:
        require_backend([tiny("quant=linear_mxfp8"), experiment])
    assert str(caught.value) == (
        f"{NATIVE}: MXFP8BlockScaling(E4M3) needs compute capability 10.0 or higher, and NVIDIA H100 has 9.0"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launcher.gpus_per_node=1", "launcher.gpu_type=b200"], None),
        (["launcher.gpus_per_node=1"], None),
        (
            ["launcher.gpus_per_node=1", "launcher.gpu_type=nvidia_h100"],
            ": MXFP8BlockScaling(E4M3) needs compute capability 10.0 or higher, and nvidia_h100 has 9.0",
        ),
        ([], " needs an NVIDIA GPU, and got launcher.gpus_per_node=0"),
    ],
)
def test_a_job_is_judged_by_the_gpu_that_it_requests(
    tiny: Make,
    machine: Callable[[str | None, Gpu | None], None],
    words: list[str],
    message: str | None,
) -> None:
    machine("2.11.0", None)
    words = ["quant=linear_mxfp8", NATIVE, "launcher=slurm", "launcher.num_processes=0", *words]
    assert missing_for_backend(tiny(*words)) == (message and NATIVE + message)


def test_a_job_with_another_python_may_have_what_is_not_installed_here(
    tiny: Make, machine: Callable[[str | None, Gpu | None], None]
) -> None:
    machine(None, None)
    words = ["quant=linear_mxfp8", NATIVE, "launcher=slurm", "launcher.gpus_per_node=1"]
    assert "which is not installed" in str(missing_for_backend(tiny(*words)))
    assert missing_for_backend(tiny(*words, "launcher.python=/opt/te/bin/python")) is None


def test_a_run_is_refused_before_its_folder_exists(
    tiny_words: list[str],
    machine: Callable[[str | None, Gpu | None], None],
    capsys: pytest.CaptureFixture[str],
    in_tmp: object,
) -> None:
    from pathlib import Path

    machine("2.11.0", None)
    assert main([*tiny_words, "quant=linear_mxfp8", NATIVE]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"quantexp: {NATIVE} needs an NVIDIA GPU, and this machine has none\n"
    assert not list(Path.cwd().iterdir())
