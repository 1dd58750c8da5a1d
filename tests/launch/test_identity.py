"""What a run's hash covers and what it does not."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest

from quantexp.config.compose import compose
from quantexp.config.evaluation import maps_of
from quantexp.launch.identity import folder_name, identity
from quantexp.schema import (
    Backend,
    CaptureLevel,
    CaptureValues,
    Experiment,
    LrSchedule,
    Nonfinite,
    Precision,
    Recompute,
    Rule,
    WandbMode,
)

from .identities import digest

Change = Callable[[Experiment], None]


@pytest.fixture(autouse=True)
def _with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that torch multiplies 16-bit matrices on."""
    monkeypatch.setattr("quantexp.launch.identity.multiplies_natively", lambda _: True)


def setting(key: str, value: object) -> Change:
    *path, last = key.split(".")

    def change(experiment: Experiment) -> None:
        node: object = experiment
        for part in path:
            node = getattr(node, part)
        setattr(node, last, value)

    return change


def after(base: Experiment, key: str, value: object) -> str:
    experiment = copy.deepcopy(base)
    setting(key, value)(experiment)
    return digest(experiment)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.num_layers", 3),
        ("model.rope_scaling_factor", None),
        ("model.init_std", 0.01),
        ("training.seed", 1),
        ("training.lr", 2e-4),
        ("training.iterations", 9),
        ("training.micro_batch_size", 1),
        ("training.lr_schedule", LrSchedule.linear),
        ("training.precision", Precision.fp32),
        ("training.nonfinite", Nonfinite.stop),
        ("launcher.num_processes", 2),
        ("training.recompute", Recompute.full),
        ("training.deterministic", True),
        ("quant.linear.format", "mxfp4"),
        ("quant.linear.wgrad.g.format", "mxfp8_e5m2"),
        ("quant.linear.block", 16),
        ("quant.qk.scale_rule", "floor"),
        ("quant.pv.format", "hifp8"),
        ("quant.rules", [Rule(layers=[0], format="bf16")]),
        ("quant.rules", [Rule(iterations=[2, 3], format="bf16")]),
        ("dataset.name", "dolma"),
        ("dataset.split", "90,10,0"),
    ],
)
def test_key_that_affects_the_numbers_changes_the_hash(
    base: Experiment, key: str, value: object
) -> None:
    assert after(base, key, value) != digest(base)


def test_a_backend_is_recorded_with_its_version_and_variables(
    base: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "backend" not in identity(base, "cpu"), "hashes of emulated runs stay"
    experiment = copy.deepcopy(base)
    experiment.quant.backend = Backend.transformer_engine
    monkeypatch.setattr(
        "quantexp.launch.identity.versions", lambda: {"transformer-engine": "2.11.0"}
    )
    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")  # as Megatron does
    monkeypatch.setenv("NVTE_DEBUG", "0")
    assert identity(experiment, "cpu")["backend"] == {
        "name": "transformer_engine",
        "transformer_engine": "2.11.0",
        "environment": {"NVTE_DEBUG": "0"},
    }
    with_variable = digest(experiment)
    monkeypatch.delenv("NVTE_DEBUG")
    assert len({digest(base), with_variable, digest(experiment)}) == 3


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.name", "other"),
        ("model.from_hf", "/elsewhere/config.json"),
        ("training.name", "other"),
        ("quant.name", "other"),
        ("dataset.label", "other"),
        ("capture.level", CaptureLevel.off),
        ("capture.dir", "/elsewhere"),
        ("capture.control_iter", 0),
        ("capture.attn_weights", True),
        ("capture.residual", True),
        ("capture.values", CaptureValues.both),
        ("analysis.auto", False),
        ("tracking.tensorboard", False),
        ("tracking.wandb.enabled", True),
        ("tracking.wandb.project", "other"),
        ("tracking.wandb.mode", WandbMode.offline),
        ("tracking.mlflow.enabled", True),
        ("tracking.mlflow.tracking_uri", "https://elsewhere"),
        ("launcher.options", {"queue": "long"}),
        ("launcher.num_threads", 3),
        ("launcher.timeout_min", 1.0),
        ("paths.root", "/elsewhere"),
        ("paths.cache", "/elsewhere"),
        ("force", True),
        ("dry_run", True),
        ("quant.linear.fprop.x.format", "mxfp8"),
        ("quant.rules", [Rule(iterations=[9, None], format="bf16")]),
    ],
)
def test_key_that_does_not_affect_the_numbers_leaves_the_hash(
    base: Experiment, key: str, value: object
) -> None:
    assert after(base, key, value) == digest(base)


def test_handling_of_nonfinite_steps_is_no_part_of_the_hash(base: Experiment) -> None:
    assert "nonfinite" not in identity(base, "cpu")["training"]


def test_device_class_changes_the_hash(base: Experiment) -> None:
    assert digest(base, "NVIDIA H200") != digest(base, "cpu")


def test_folder_name_has_model_dataset_scheme_and_hash(base: Experiment) -> None:
    name = folder_name(base, identity(base, "cpu"))
    assert re.fullmatch(r"llama32-1b_wikipedia_FA_linear_mxfp8-[0-9a-f]{8}", name)


def test_identity_is_readable(base: Experiment) -> None:
    content = identity(base, "cpu")
    assert set(content) == {
        "model",
        "data",
        "scheme",
        "training",
        "attention_path",
        "device_class",
        "data_parallel",
        "numerics",
    }


def test_absent_parts_of_a_model_leave_its_hash_unchanged(base: Experiment) -> None:
    model = identity(base, "cpu")["model"]
    assert not {"mla", "moe", "qkv_bias", "qk_norm", "sliding_window"} & model.keys()
    assert after(base, "model.sliding_window", 8192) == digest(base)


@pytest.mark.parametrize("key", ["model.qkv_bias", "model.qk_norm"])
def test_biases_and_norms_of_heads_change_the_hash(base: Experiment, key: str) -> None:
    assert after(base, key, True) != digest(base)


@pytest.mark.parametrize(
    "word",
    [
        "model.moe.top_k=5",
        "model.moe.aux_loss=batch",
        "model.moe.num_experts=9",
        "model.mla.q_lora_rank=64",
        "model.mla.yarn.mscale=1",
    ],
)
def test_attention_and_experts_change_the_hash(word: str) -> None:
    words = ["training=fast", "model=deepseek2_lite"]
    assert digest(compose([*words, word], None, {})) != digest(compose(words, None, {}))


def test_weight_cache_counts_only_where_micro_batches_share_a_draw(base: Experiment) -> None:
    """A recomputed copy has the same bits, unless each micro-batch rounds it stochastically by itself."""
    assert after(base, "training.weight_cache", False) == digest(base)
    words = ["quant=linear_mxfp4", "quant.linear.dgrad.w.rounding=stochastic"]
    drawn = compose(["training=fast", "training.micro_batch_size=1", *words], None, {})
    assert "weight_cache" in identity(drawn, "cpu")["training"]
    assert after(drawn, "training.weight_cache", False) != digest(drawn)
    for key, value in (("training.global_batch_size", 1), ("quant.linear.hadamard", "random")):
        alone = copy.deepcopy(drawn)
        setting(key, value)(alone)
        assert after(alone, "training.weight_cache", False) == digest(alone), key


def test_products_through_fp32_are_in_the_identity_and_torchs_own_kernels_are_not(
    base: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def covered(native: bool, device: str = "cpu", **launcher: object) -> dict[str, object]:
        monkeypatch.setattr("quantexp.launch.identity.multiplies_natively", lambda _: native)
        experiment = copy.deepcopy(base)
        for key, value in launcher.items():
            setattr(experiment.launcher, key, value)
        return identity(experiment, device)

    native = covered(native=True)
    assert "products" not in native
    assert covered(native=False) == {**native, "products": "fp32"}
    assert "products" not in covered(native=False, device="NVIDIA H200")
    assert "products" not in covered(native=False, kind="slurm")


EXPERTS = ("training=fast", "model=deepseek2_lite", "training.global_batch_size=16")


@pytest.mark.parametrize(
    ("words", "recorded"),
    [
        (("training=fast", "quant=FA_linear_mxfp8"), "36da3b10"),
        (
            (
                "training=fast",
                "quant=FA_linear_mxfp8",
                "training.global_batch_size=4",
                "launcher.num_processes=2",
            ),
            "7e5f45a9",
        ),
        (("training=fast", "model=deepseek2_lite"), "87ec050b"),
    ],
    ids=["llama", "data parallel", "experts"],
)
def test_model_that_is_not_divided_has_the_identity_recorded_before_layouts(
    words: tuple[str, ...], recorded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apart from the version of the numerics, which initial weights have raised since."""
    monkeypatch.setattr("quantexp.launch.identity.NUMERICS_VERSION", 1)
    assert digest(compose(list(words), None, {})) == recorded


def layout_in(*words: str) -> dict[str, object]:
    """What the identity of a layout has beside that of one process."""
    content = identity(compose([*EXPERTS, *words], None, {}), "cpu")
    plain = identity(compose(list(EXPERTS), None, {}), "cpu")
    return {key: value for key, value in content.items() if plain.get(key) != value}


@pytest.mark.parametrize(
    ("words", "content"),
    [
        ("tensor=2", {"layout": {"tensor": 2, "sequence": True}}),
        ("context=2", {"layout": {"context": 2}}),
        (
            "expert=2",
            {
                "data_parallel": 2,
                "layout": {"expert": 2, "expert_tensor": 1, "dispatcher": "allgather"},
            },
        ),
        ("pipeline=2", {}),
    ],
)
def test_layout_is_part_of_the_identity_where_it_changes_sums(
    words: str, content: dict[str, object]
) -> None:
    assert layout_in("launcher.num_processes=2", f"parallel.{words}") == content


def test_chunks_of_layers_and_shares_of_the_optimizer_are_not() -> None:
    words = ("launcher.num_processes=2", "model.num_layers=4", "parallel.pipeline=2")
    chunks = ("parallel.virtual_pipeline=2", "training.distributed_optimizer=true")
    assert layout_in(*words) == layout_in(*words, *chunks)


def test_stages_are_part_of_the_identity_of_tied_embeddings() -> None:
    words = ("launcher.num_processes=2", "parallel.pipeline=2")
    assert layout_in("model.tie_embeddings=true", *words)["layout"] == {"pipeline": 2}


def test_identity_of_an_evaluation_has_what_a_forward_pass_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quantexp.launch.identity._model", lambda _: {"name": "m"})
    monkeypatch.setattr("quantexp.launch.identity._start", lambda *_: {})
    start = "training.start_from=run@3"

    def made(*words: str) -> Experiment:
        return compose(
            ["training=fast", "capture=off", "evaluate.only=true", start, *words], None, {}
        )

    own = digest(made("quant=linear_mxfp4"))
    same = (
        "training.lr=1e-3",
        "training.iterations=9",
        "quant.linear.dgrad.g={format: bf16}",
        "training.clip_grad=0",
    )
    for word in same:
        assert digest(made("quant=linear_mxfp4", word)) == own, word
    other = (
        "quant.linear.fprop.x={format: bf16}",
        "training.seed=1",
        "training.seq_length=64",
        "training.precision=fp32",
        "evaluation.samples=64",
        "evaluate.each_layer=true",
        "training.attention=fused",
    )
    digests = {digest(made("quant=linear_mxfp4", word)) for word in other}
    assert len(digests | {own}) == len(other) + 1
    experiment = made("quant=linear_mxfp4")
    name = folder_name(experiment, identity(experiment, "cpu"))
    assert re.fullmatch(r"llama32-1b_wikipedia_linear_mxfp4_evaluated-[0-9a-f]{8}", name)


def test_rules_of_an_evaluation_are_those_of_the_checkpoints_iteration() -> None:
    rule = "quant.rules=[{iterations: [1, 10], sites: [linear], format: bf16}]"

    def formats(iteration: int) -> set[str]:
        words = [
            f"training.start_from=run@{iteration}",
            "quant=linear_mxfp4",
            "quant/qk=mxfp8",
            rule,
        ]
        experiment = compose(
            ["training=fast", "capture=off", "evaluate.only=true", *words], None, {}
        )
        (declared,) = maps_of(experiment)
        return {e.spec.fmt.name for m in declared.values() for e in m.entries()}

    assert formats(10) == {"bf16", "mxfp8_e4m3"}
    assert formats(11) == {"bf16", "mxfp8_e4m3", "mxfp4_e2m1"}


def test_parts_are_in_the_identity_with_each_of_their_keys() -> None:
    part = {"take": "channels", "along": "tokens", "number": 4, "format": "mxfp8"}

    def made(*words: str) -> Experiment:
        return compose(["training=fast", "capture=off", *words], None, {})

    changes: list[dict[str, object]] = [
        {},
        {"take": "mean", "number": None},
        {"take": "elements", "along": None},
        {"along": "input_width"},
        {"number": 5},
        {"number": None, "share": 0.5},
        {"from_error": True},
        {"format": "bf16"},
        {"format": "mxfp4"},
    ]

    def words(values: dict[str, object]) -> str:
        own = {key: value for key, value in values.items() if value is not None}
        return f"[{{{', '.join(f'{key}: {value}' for key, value in own.items())}}}]"

    digests = {digest(made("quant=linear_mxfp4"))} | {
        digest(made("quant=linear_mxfp4", f"quant.linear.fprop.x.parts={words(part | change)}"))
        for change in changes
    }
    assert len(digests) == 1 + len(changes)
    none = digest(made("quant=linear_mxfp4", "quant.linear.fprop.x.parts=[]"))
    assert none == digest(made("quant=linear_mxfp4"))
