"""What a plan says of Transformer Engine, for this machine and for a GPU that is not there."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from quantexp.cli.main import main
from quantexp.cli.plan import record
from quantexp.cli.plan_backend import device_of
from quantexp.cli.plan_record import Plan, make_plan
from quantexp.config.compose import compose
from quantexp.errors import ConfigError
from quantexp.extras.transformer_engine.planning import used_recipes
from quantexp.extras.transformer_engine.scheme.hardware import Gpu, gpu_named
from quantexp.extras.transformer_engine.scheme.recipes import Kind, Recipe
from quantexp.launch.refusal import missing_for_backend, require_backend
from quantexp.schema import Experiment
from tests.cli.plans import text_of

NATIVE = "quant.backend=transformer_engine"


@pytest.fixture(autouse=True)
def _not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "quantexp.extras.transformer_engine.planning.installed_version", lambda: None
    )


def planned(words: list[str], device: str | None) -> Plan:
    words = ["model=tiny", "training=fast", *words]
    return make_plan(compose(words, None, {}), gpu=(device and gpu_named(device)) or None)


def test_a_plan_has_the_recipe_of_each_module_and_what_is_missing_here() -> None:
    plan = planned(["quant=FA_linear_mxfp8", NATIVE, "training.micro_batch_size=1"], None)
    content = json.loads(json.dumps(record(plan)))
    assert content["backend"] == {
        "name": "transformer_engine",
        "transformer_engine": None,
        "device": None,
        "recipes": [
            {
                "recipe": "MXFP8BlockScaling(E4M3)",
                "nearness": "bit-equal operands",
                "notes": [],
                "layers": [0, 1],
                "modules": ["qkv", "proj", "fc1", "fc2"],
            }
        ],
        "obstacle": None,
    }
    recipes = {entry["site"]: entry.get("recipe") for entry in content["precision_map"]}
    assert recipes == {"linear": "MXFP8BlockScaling(E4M3)", "qk": None, "pv": None}
    assert content["missing"] == (
        f"{NATIVE} needs Transformer Engine, which is not installed: pip install 'quantexp[te]'"
    )
    text = text_of(plan, 300)
    assert (
        "MXFP8BlockScaling(E4M3) in qkv, proj, fc1, fc2 of layers 0-1: bit-equal operands" in text
    )
    assert "mxfp8_e4m3, blocks of 32 along tokens, rceil, MXFP8BlockScaling" in text
    assert "plan device=NAME says whether that GPU can run it" in text
    assert "attention, the output layer, routed experts, Adam's moments and gradients" in text
    assert "will not start:" in text


def test_a_plan_answers_for_a_gpu_that_is_not_there() -> None:
    words = ["quant=linear_mxfp8", NATIVE]
    refused, possible = planned(words, "h100"), planned(words, "b200")
    assert refused.backend is not None
    assert refused.backend.obstacle == (
        "MXFP8BlockScaling(E4M3) needs compute capability 10.0 or higher, and h100 has 9.0"
    )
    assert f"cannot run: {refused.backend.obstacle}" in text_of(refused, 300)
    assert possible.backend is not None
    assert (possible.backend.device, possible.backend.obstacle) == ("b200", None)
    assert possible.missing is None, "this machine was not asked for"


@pytest.mark.parametrize(
    ("scheme", "answer"),
    [
        ("linear_mxfp8", "MXFP8BlockScaling(E4M3) in qkv, proj, fc1, fc2 of layers 0-1: bit-equal"),
        (
            "linear_hifp8",
            "linear.fprop.x has element hif8, and no recipe of Transformer Engine has",
        ),
    ],
)
def test_a_plan_of_an_emulated_scheme_says_what_the_gpu_would_run(scheme: str, answer: str) -> None:
    plan = planned([f"quant={scheme}", "training.micro_batch_size=1"], "b200")
    text = text_of(plan, 300)
    assert "emulated; quant.backend=transformer_engine on b200 would be:" in text
    assert answer in text
    assert plan.missing is None
    assert planned([f"quant={scheme}"], None).backend is None, "nobody asked"


def test_delayed_scaling_is_said_as_transformer_engine_does_it() -> None:
    text = text_of(planned(["quant=more/te_fp8_delayed"], "h100"), 300)
    assert (
        "max / amax of the last 1024 micro-batches, 1 for the first, and is updated after" in text
    )
    assert (
        "one scale a tensor (delayed over 1024 micro-batches), amax to 448, DelayedScaling" in text
    )


def test_a_gpu_that_is_not_known_is_refused_with_those_that_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert device_of(["a=1", "device=GB200"])[0] == ["a=1"]
    with pytest.raises(ConfigError, match=r"device must be one of .*, got h100, b200"):
        device_of(["device=h100", "device=b200"])
    assert main(["plan", "device=mi300", "training=fast"]) == 1
    assert capsys.readouterr().err == (
        "quantexp: device must be one of v100, a100, l40s, l40, l4, rtx4090, h100, h200, h20, gh200, gb200, b100, "
        "b200, gb300, b300, rtx5090, got mi300\n"
    )


Make = Callable[..., Experiment]
H100, B200 = Gpu("NVIDIA H100", (9, 0), (12, 9)), Gpu("NVIDIA B200", (10, 0), (12, 9))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None, Gpu | None], None]:
    """Sets the version of Transformer Engine and the GPU of this machine."""

    def has(version: str | None, gpu: Gpu | None) -> None:
        monkeypatch.setattr(
            "quantexp.extras.transformer_engine.planning.installed_version", lambda: version
        )
        monkeypatch.setattr("quantexp.extras.transformer_engine.planning.this_gpu", lambda: gpu)

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
