"""Whole runs on Transformer Engine's linear layers in every layout of two processes, proved on both ranks.

A sum of two summands has no order. Own formats are therefore equal to the emulation bit for bit in each of these
layouts, and so are the losses of tensor parallelism with and without sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.extras.transformer_engine.rank import kernels
from tests.extras.transformer_engine.rank.ranks import Ran, Ranks, equal
from tests.extras.transformer_engine.rank.wheels import LATER, VERSIONS

NATIVE, OWN = "quant.backend=transformer_engine", "quant.backend=te_emulated"
Make = Callable[..., Ranks]
Models = dict[str, list[str]]

LAYOUTS = {
    "tp2 sp": ("parallel.tensor=2",),
    "tp2": ("parallel.tensor=2", "parallel.sequence=false"),
    "pp2": ("parallel.pipeline=2",),
    "pp2 interleaved": ("parallel.pipeline=2", "parallel.virtual_pipeline=2", "model.num_layers=4"),
    "cp2": ("parallel.context=2", "training.seq_length=128"),
    "dp2": ("training.distributed_optimizer=false",),
    "dp2 distributed optimizer": ("training.distributed_optimizer=true",),
    "ep2": ("parallel.expert=2",),
    "ep2 alltoall": ("parallel.expert=2", "parallel.dispatcher=alltoall"),
}
#: Latent attention and shared experts, of which half has multiples of 16.
DEEPSEEK = ("model.mla.v_head_dim=24", "model.moe.expert_ffn_hidden_size=48")
EXPERTS_IN_BF16 = "quant.rules=[{modules: [expert*], format: bf16}]"
#: Blocks of 128, also of a rank's tokens and columns.
IN_128 = (
    *("model.hidden_size=256", "model.ffn_hidden_size=256", "model.head_dim=64"),
    *("model.num_query_groups=4", "training.seq_length=512"),
)
SR_RHT = "linear_mxfp4_sr_rht"
CAPTURED = ("capture=tensors", "evaluation.every=1", "evaluation.samples=2")
FAULT = "tests.extras.transformer_engine.rank.kernels:scale_of_own_tokens"
OVERLAPPING = "tests.training.megatron.layout_faults:overlapping"
RANDOM = "by its class: the random bits are Transformer Engine's, it was not compared"


def proved(run: Ran, *by_class: str) -> Ran:
    """A run that completed and whose slots engaged on every rank that holds them, compared value by value.

    `by_class` are reasons why a slot was not; a block of zeros of NVFP4 has Transformer Engine's own scale.
    """
    assert run.reason is None
    assert run.precision["proved"]
    compared = {
        (s, r)
        for s, r in run.statuses
        if not r.endswith("Transformer Engine's own, of blocks of zeros")
    }
    assert compared == {("engaged", ""), *(("engaged", reason) for reason in by_class)}
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("tp2 sp", ("quant=FA_linear_mxfp4", *CAPTURED)),
        ("pp2", ("quant=linear_hifp8", *CAPTURED)),
        ("cp2", ("quant=linear_hifp8",)),
        ("dp2 distributed optimizer", ("quant=linear_hifp8",)),
    ],
    ids=str,
)
def test_own_formats_are_the_emulation_to_the_bit(
    ranks: Make, layout: str, words: tuple[str, ...]
) -> None:
    words = (*words, *LAYOUTS[layout])
    own, emulated = proved(ranks().run(*words, OWN)), ranks().run(*words)
    assert own.metrics == emulated.metrics
    if "capture=tensors" in words:
        assert len(own.captured()) == 2 * (4 * 5 + 8), "layers, linear modules, attention"
        assert equal(own.captured(), emulated.captured())


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["te_mxfp8", "te_fp8_current"])
def test_gathered_operands_are_those_of_whole_tensors(ranks: Make, scheme: str) -> None:
    """Sequence parallelism gathers codes. They, and the losses, are those without it; gradients of norms, which then
    are sums over ranks, differ by their rounding to bf16, less than 1e-4 of the norm."""
    words = (f"quant=more/{scheme}", "evaluation.every=1", "evaluation.samples=2")
    gathered, whole = (proved(ranks().run(*words, *LAYOUTS[name])) for name in ("tp2 sp", "tp2"))
    assert gathered.metrics[0][0] == whole.metrics[0][0]
    assert gathered.metrics[0][1] == pytest.approx(whole.metrics[0][1], rel=1e-4)
    for theirs, ours in zip(gathered.metrics, whole.metrics, strict=True):
        assert theirs[::2] == pytest.approx(ours[::2], rel=1e-4)


@pytest.mark.slow
def test_scales_of_own_tokens_in_place_of_the_whole_tensor_fail_the_proof(ranks: Make) -> None:
    run = ranks().run("quant=more/te_fp8_current", *LAYOUTS["tp2 sp"], plant=FAULT)
    assert run.reason is not None
    assert "layer 0 qkv linear.fprop.x: declared fp8_e4m3" in run.reason
    assert "scales differ from those of fp8_e4m3 of its source" in run.reason


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", "tp2 sp"])
def test_a_history_of_amaxes_is_that_of_both_ranks(ranks: Make, layout: str) -> None:
    both = ranks()
    proved(both.run("quant=more/te_fp8_delayed", *LAYOUTS[layout]))
    first, second = both.ask(kernels.updated_scales)
    assert len(first) == {"dp2": 4, "tp2 sp": 8}[layout], (
        "forward and backward, of each micro-batch"
    )
    assert first == second


@pytest.mark.slow
def test_stages_of_a_recipe_are_one_process_to_the_bit(ranks: Make, tiny_models: Models) -> None:
    """Untied embeddings: tied ones get their two uses added in another order."""
    words = (*tiny_models["llama31-8b"], "quant=more/te_mxfp8")
    one, two = ranks(1).run(*words), proved(ranks().run(*words, *LAYOUTS["pp2"]))
    assert one.reason is None
    assert two.metrics == one.metrics


@pytest.mark.slow
def test_a_divided_optimizer_and_overlapped_collectives_change_no_bit(ranks: Make) -> None:
    """Data parallelism of a recipe; a GPU overlaps the reduction of gradients with the backward pass."""
    words = ("quant=more/te_mxfp8", "training.iterations=3")
    whole = proved(ranks().run(*words, *LAYOUTS["dp2"]))
    for plant in ("", OVERLAPPING):
        divided = proved(ranks().run(*words, *LAYOUTS["dp2 distributed optimizer"], plant=plant))
        assert divided.metrics == whole.metrics


@pytest.mark.slow
def test_ranks_go_on_from_a_checkpoint_bit_for_bit(ranks: Make) -> None:
    words = ("quant=more/te_mxfp8", *LAYOUTS["tp2 sp"])
    words += ("checkpoint.optimizer=true", "checkpoint.every=1")
    whole = proved(ranks().run(*words))
    start = (f"training.start_from={whole.root}@1", "training.start_optimizer=true")
    assert proved(ranks().run(*words, *start)).metrics == whole.metrics[1:]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("version", "layout"),
    [
        *((VERSIONS[0], name) for name in LAYOUTS if "ep2" not in name),
        (VERSIONS[1], "tp2 sp"),
    ],
)
@pytest.mark.parametrize(
    "words",
    [
        ("quant=more/te_mxfp8",),
        ("quant=more/te_mxfp8_hybrid",),
        ("quant=more/te_fp8_current",),
        ("quant=more/te_fp8_delayed",),
        ("quant=more/te_fp8_blockwise", *IN_128),
        ("quant=more/te_nvfp4",),
        ("quant=more/linear_nvfp4", NATIVE),
        ("quant=FA_linear_mxfp8", NATIVE),
        ("quant=bf16", NATIVE),
    ],
    ids=str,
)
def test_every_recipe_is_proved_in_every_layout(
    ranks: Make, version: str, words: tuple[str, ...], layout: str
) -> None:
    if layout == "pp2 interleaved" and "delayed" in words[0]:
        return  # refused
    sizes = [
        word for word in LAYOUTS[layout] if "seq_length" not in word or "blockwise" not in words[0]
    ]
    random = [RANDOM] if "te_nvfp4" in words[0] else []
    proved(ranks(version=version).run(*words, *sizes), *random)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("words", "layout", "version"),
    [
        *((f"quant=more/{SR_RHT}", name, VERSIONS[0]) for name in ("tp2 sp", "tp2", "cp2")),
        *(("quant=linear_hifp8", n, VERSIONS[0]) for n in ("tp2", "pp2 interleaved", "dp2")),
        ("quant=linear_hifp8 training.recompute=full", "tp2 sp", VERSIONS[0]),
        ("quant=more/linear_hifp8_delayed", "tp2 sp", VERSIONS[0]),
        *(("quant=linear_hifp8", "tp2 sp", version) for version in (VERSIONS[1], LATER)),
    ],
)
def test_more_schemes_are_the_emulation_to_the_bit_in_more_layouts(
    ranks: Make, words: str, layout: str, version: str
) -> None:
    more = [*LAYOUTS[layout]]
    if SR_RHT in words:  # half a chunk, and a rank's half of fc2, are a Hadamard block
        more += ["training.seq_length=256", "model.ffn_hidden_size=256"]
    own = proved(ranks(version=version).run(*words.split(), *more, OWN))
    assert own.metrics == ranks(version=version).run(*words.split(), *more).metrics


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ep2", "ep2 alltoall", "tp2 sp"])
def test_latent_attention_and_experts_are_the_emulation_to_the_bit(
    ranks: Make, tiny_models: Models, layout: str
) -> None:
    words = (*tiny_models["deepseek2_lite"], *DEEPSEEK, "quant=linear_hifp8", *LAYOUTS[layout])
    own = proved(ranks().run(*words, OWN))
    assert own.metrics == ranks().run(*words).metrics


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["ep2", "ep2 alltoall", "tp2 sp"])
@pytest.mark.parametrize("model", ["deepseek2_lite", "qwen3_moe"])
def test_recipes_beside_experts_in_bf16_are_proved(
    ranks: Make, tiny_models: Models, model: str, layout: str
) -> None:
    sizes = DEEPSEEK if model == "deepseek2_lite" else DEEPSEEK[1:]
    words = (*tiny_models[model], *sizes, "quant=more/te_fp8_current", EXPERTS_IN_BF16)
    proved(ranks().run(*words, *LAYOUTS[layout]))
