"""Slots whose blocks fall otherwise in a layout: against shards that are cut and quantised."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from quantexp.config.compose import compose
from quantexp.config.validate.experiment import validate
from quantexp.errors import ConfigError
from quantexp.formats import quantise
from quantexp.model.decoder import is_routed, linear_shapes
from quantexp.model.layout import Layout
from quantexp.model.shards import WHOLE, shard_of
from quantexp.quant.alignment import kinds_of_modules, misalignments, unaligned_slots
from quantexp.quant.precision import declared_maps
from quantexp.schema import Experiment, ParallelConfig, Unaligned

#: Module -> the end of its parameter's global name.
PARAMETERS = {
    "qkv": "self_attention.linear_qkv",
    "q-proj": "self_attention.linear_q_proj",
    "q-down": "self_attention.linear_q_down_proj",
    "q-up": "self_attention.linear_q_up_proj",
    "kv-down": "self_attention.linear_kv_down_proj",
    "kv-up": "self_attention.linear_kv_up_proj",
    "proj": "self_attention.linear_proj",
    "fc1": "mlp.linear_fc1",
    "fc2": "mlp.linear_fc2",
    "shared-fc1": "mlp.shared_experts.linear_fc1",
    "shared-fc2": "mlp.shared_experts.linear_fc2",
    "expert0-fc1": "mlp.experts.local_experts.0.linear_fc1",
    "expert0-fc2": "mlp.experts.local_experts.0.linear_fc2",
}
LLAMA = (
    "model=llama32-1b",
    "model.hidden_size=96",
    "model.ffn_hidden_size=160",
    "model.head_dim=6",
)
#: Widths of which some are multiples of the block at two ranks, some at four, and some at none.
DEEPSEEK = (
    *(
        "model=deepseek2_lite",
        "model.num_layers=2",
        "model.hidden_size=64",
        "model.ffn_hidden_size=96",
    ),
    *("model.moe.num_experts=4", "model.moe.top_k=2", "model.moe.expert_ffn_hidden_size=48"),
    *("model.mla.kv_lora_rank=120", "model.mla.qk_head_dim=24", "model.mla.qk_pos_emb_head_dim=8"),
    *("model.head_dim=32", "model.mla.v_head_dim=20", "model.num_attention_heads=4"),
    *("model.num_query_groups=4", "model.mla.q_lora_rank=64"),
)

Q_PROJ = (*DEEPSEEK, "model.mla.q_lora_rank=null")


@cache
def experiment_of(*words: str) -> Experiment:
    return compose(["training.seq_length=256", *words], None, {})


def listed(experiment: Experiment, layout: Layout) -> set[tuple[str, str]]:
    """Module and slot, of those that the alignment lists."""
    kinds = kinds_of_modules(experiment.model, declared_maps(experiment.model, experiment.quant))
    return {
        (module, str(slot))
        for one in misalignments(kinds, layout, experiment.training.seq_length)
        for module in one.modules
        for slot in one.slots
    }


def changed_by_cutting(w: Tensor, name: str, axis: int, layout: Layout) -> bool:
    """Whether a weight that is cut and then quantised along an axis has other values than one that is not cut."""
    whole = quantise(w, "mxfp4", axis=axis)
    for _, place in layout.places():
        shard = shard_of(name, tuple(w.shape), layout, place)
        if shard == WHOLE:
            continue
        assert shard.axis is not None
        cut = [
            torch.cat([x.narrow(shard.axis, a, b - a) for a, b in shard.ranges], shard.axis)
            for x in (w, whole)
        ]
        if not torch.equal(quantise(cut[0], "mxfp4", axis=axis), cut[1]):
            return True
    return False


@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("words", [LLAMA, DEEPSEEK, Q_PROJ], ids=["llama", "deepseek", "q-proj"])
def test_listed_weights_are_those_whose_values_change_if_they_are_cut(
    words: tuple[str, ...], tensor: int
) -> None:
    experiment = experiment_of(*words, "quant=linear_mxfp4")
    layout = Layout(tensor=tensor, expert_tensor=tensor)
    generator = torch.Generator().manual_seed(1)
    shapes = linear_shapes(experiment.model, 0) | linear_shapes(experiment.model, 1)
    expected = set()
    for module, shape in shapes.items():
        if is_routed(module) and not module.startswith("expert0-"):
            continue
        w = torch.randn(shape.output_width, shape.input_width, generator=generator)
        name = f"decoder.layers.1.{PARAMETERS[module]}.weight"
        for axis, slot in ((1, "linear.fprop.w"), (0, "linear.dgrad.w")):
            if changed_by_cutting(w, name, axis, layout):
                expected.add((module, slot))
    assert expected
    slots = listed(experiment, layout)
    kept = {(m, s) for m, s in slots if m in PARAMETERS}
    assert {(m, s) for m, s in kept if s.endswith(".w")} == expected
    partners = {"linear.fprop.w": "linear.fprop.x", "linear.dgrad.w": "linear.dgrad.g"}
    assert kept - expected == {(m, partners[s]) for m, s in expected}, "both operands of a product"


@pytest.mark.parametrize(("tokens", "context"), [(256, 2), (256, 4), (256, 8), (64, 2), (96, 1)])
def test_sequences_change_values_where_their_ranges_end_within_a_block(
    tokens: int, context: int
) -> None:
    """A rank has two ranges of a sequence, the first from its begin and the second as far from its end."""
    x = torch.randn(tokens, 3, generator=torch.Generator().manual_seed(1))
    whole = quantise(x, "mxfp4", axis=0)
    each = tokens // (2 * context)
    changed = False
    for rank in range(context):
        parts = [slice(i * each, (i + 1) * each) for i in (rank, 2 * context - 1 - rank)]
        own = torch.cat([x[part] for part in parts])
        quantised = quantise(own, "mxfp4", axis=0)
        changed |= not torch.equal(quantised, torch.cat([whole[part] for part in parts]))
    experiment = experiment_of(*LLAMA, "quant=more/FA_full_mxfp4", "quant/linear=mxfp4")
    experiment = replace(experiment, training=replace(experiment.training, seq_length=tokens))
    slots = {slot for _, slot in listed(experiment, Layout(context=context))}
    along_queries = {"qk.dgrad_k.dS", "linear.wgrad.g", "linear.wgrad.x"}
    assert along_queries <= slots if changed else not slots
    assert not {slot for slot in slots if "fprop" in slot or "dgrad_q." in slot}


def test_experts_never_have_the_blocks_of_one_process_where_ranks_share_a_sequence() -> None:
    experiment = experiment_of(*DEEPSEEK, "quant=linear_mxfp4")
    slots = listed(experiment, Layout(context=2))
    assert ("expert3-fc2", "linear.wgrad.x") in slots
    assert {module for module, _ in slots} == {f"expert{i}-fc{j}" for i in range(4) for j in (1, 2)}


def test_routed_experts_are_divided_among_their_own_ranks() -> None:
    experiment = experiment_of(*DEEPSEEK, "quant=linear_mxfp4")
    modules = {
        module for module, _ in listed(experiment, Layout(data=2, expert=2, expert_tensor=2))
    }
    assert modules == {f"expert{i}-fc{j}" for i in range(4) for j in (1, 2)}


def test_expert_parallelism_and_stages_change_no_block() -> None:
    experiment = experiment_of(*DEEPSEEK, "quant=linear_mxfp4")
    assert listed(experiment, Layout(data=2, expert=2, pipeline=2)) == set()


def test_formats_without_blocks_are_listed_for_parted_tokens_of_experts_alone() -> None:
    for scheme in ("FA_linear_hifp8", "bf16", "more/FA_full_fp8"):
        experiment = experiment_of(*DEEPSEEK, f"quant={scheme}")
        assert listed(experiment, Layout(tensor=4, expert_tensor=4)) == set()
    slots = listed(experiment_of(*DEEPSEEK, "quant=linear_hifp8"), Layout(context=2))
    assert {module for module, _ in slots} == {f"expert{i}-fc{j}" for i in range(4) for j in (1, 2)}
    products = ("fprop.x", "dgrad.g", "wgrad.g", "wgrad.x")
    assert {slot for _, slot in slots} == {f"linear.{each}" for each in products}
    assert listed(experiment_of(*DEEPSEEK, "quant=FA_linear_hifp8"), Layout(expert=2)) == set()


def test_random_numbers_by_position_are_listed_where_the_position_is_unknown() -> None:
    words = ["quant=linear_hifp8", "quant.linear.scaling=none", "quant.linear.rounding=stochastic"]
    experiment = experiment_of(*DEEPSEEK, *words)
    slots = listed(experiment, Layout(context=2))
    assert {module for module, _ in slots} == {f"expert{i}-fc{j}" for i in range(4) for j in (1, 2)}
    products = ("fprop.x", "dgrad.g", "wgrad.g", "wgrad.x")
    assert {slot for _, slot in slots} == {f"linear.{each}" for each in products}
    assert listed(experiment, Layout(data=2, tensor=2, sequence=True, expert=2)) == set()


@pytest.mark.parametrize("path", ["plain", "tiled"])
def test_random_numbers_of_attention_are_those_of_one_process(path: str) -> None:
    words = [f"training.attention={path}", "quant=more/FA_full_mxfp4", "quant/pv=mxfp4"]
    words += [f"quant.{site}.rounding=stochastic" for site in ("qk", "pv")]
    experiment = experiment_of("model=llama32-1b", *words)
    assert listed(experiment, Layout(tensor=2, sequence=True, context=2)) == set()


def test_experts_of_fewer_ranks_than_tensor_have_parts_of_each_sequence() -> None:
    """With expert_tensor=1 the two ranks of an expert group have half of the tokens; see `test_layouts`."""
    experiment = experiment_of(*DEEPSEEK, "quant=linear_mxfp4")
    layout = Layout(tensor=4, sequence=True, expert=2)
    of_experts = {(m, slot) for m, slot in listed(experiment, layout) if is_routed(m)}
    slots = ("linear.wgrad.g", "linear.wgrad.x")
    assert of_experts == {(f"expert{i}-fc{j}", s) for i in range(4) for j in (1, 2) for s in slots}
    whole = listed(experiment, Layout(tensor=4, sequence=True, expert=4))
    assert not [module for module, _ in whole if is_routed(module)]


def test_blocks_of_a_hadamard_transform_count_too() -> None:
    words = ("model=llama32-1b", "quant=linear_mxfp4", "quant.linear.hadamard=deterministic")
    long = experiment_of(*words, "quant.linear.hadamard_block=1024")
    assert {module for module, _ in listed(long, Layout(tensor=4))} == {"qkv", "proj"}
    assert listed(experiment_of(*words), Layout(tensor=4)) == set()


def test_shipped_models_are_aligned_as_far_as_documented() -> None:
    for model, aligned in {"llama31-8b": 16, "llama32-1b": 16, "deepseek2_lite": 2}.items():
        experiment = experiment_of(f"model={model}", "quant=FA_linear_mxfp4")
        for tensor in (2, 4, 8, 16):
            layout = Layout(tensor=tensor, expert_tensor=tensor)
            assert bool(listed(experiment, layout)) == (tensor > aligned), (model, tensor)


def refused(*words: str) -> str:
    experiment = experiment_of(*words)
    with pytest.raises(ConfigError) as caught:
        validate(experiment)
    return str(caught.value)


ACCEPTED = (
    *("parallel.unaligned=accept", "parallel.tensor=4", "quant=linear_mxfp4"),
    *("training.global_batch_size=16", "launcher.num_processes=4"),
)


def test_layout_with_other_blocks_is_refused_with_the_slots_module_by_module() -> None:
    experiment = experiment_of("model=deepseek2_lite", *ACCEPTED)
    refusing = replace(
        experiment, parallel=replace(experiment.parallel, unaligned=Unaligned.refuse)
    )
    with pytest.raises(ConfigError) as caught:
        validate(refusing)
    assert str(caught.value) == (
        "parallel.tensor=4 must leave the blocks of every slot as in one process, got others in linear.dgrad.g, "
        "linear.dgrad.w of kv-down (blocks of 32, 144 to a rank); linear.dgrad.g, linear.dgrad.w of fc1 (blocks of 32, "
        "2,736 to a rank); linear.fprop.x, linear.fprop.w of fc2 (blocks of 32, 2,736 to a rank); take a smaller size, "
        "or parallel.unaligned=accept for a run with its own numbers"
    )


def test_accepted_layout_lists_its_slots() -> None:
    experiment = experiment_of("model=deepseek2_lite", *ACCEPTED)
    assert [one.modules for one in unaligned_slots(experiment)] == [
        ("kv-down",),
        ("fc1",),
        ("fc2",),
    ]
    assert unaligned_slots(experiment_of("model=deepseek2_lite", "quant=linear_mxfp4")) == []


@pytest.mark.parametrize(
    ("layout", "key"),
    [
        ({"context": 64}, "parallel.context=64 must leave"),
        (
            {"tensor": 8, "expert": 2, "expert_tensor": 8},
            "parallel.tensor=8 and parallel.expert_tensor=8 must",
        ),
        (
            {"tensor": 4, "sequence": True, "expert": 2, "expert_tensor": 1},
            "parallel.tensor=4 must leave",
        ),
    ],
    ids=str,
)
def test_refusal_names_the_sizes_that_divide_blocks(layout: dict[str, int], key: str) -> None:
    experiment = experiment_of("model=deepseek2_lite", *ACCEPTED)
    parallel = ParallelConfig(**layout)  # type: ignore[arg-type]
    launcher = replace(experiment.launcher, num_processes=64)
    training = replace(experiment.training, seq_length=2048, global_batch_size=64)
    with pytest.raises(ConfigError) as caught:
        validate(replace(experiment, parallel=parallel, launcher=launcher, training=training))
    assert str(caught.value).startswith(key)


@pytest.mark.parametrize(("tensor", "is_cut"), [(4, False), (8, True)])
def test_ranks_divide_the_padded_vocabulary_of_the_output_layer(tensor: int, is_cut: bool) -> None:
    """257 ids are padded to 384 rows: 96 of four ranks are whole blocks of 32, 48 of eight are not."""
    heads = ("model.num_attention_heads=8", "model.num_query_groups=8", "model.ffn_hidden_size=256")
    words = ("training=fast", *heads, "quant=bf16", "quant/output=mxfp4")
    slots = listed(experiment_of(*words), Layout(tensor=tensor))
    divided = {("output", f"output.dgrad.{operand}") for operand in ("g", "w")}
    assert slots == (divided if is_cut else set())


def test_blocks_of_rows_are_divided_in_a_tied_embedding_too() -> None:
    words = ("quant=bf16", "quant.output.fprop.w.format=fp8_128x128", "model.vocab_size=257")
    slots = listed(experiment_of(*LLAMA, *words), Layout(tensor=4))
    assert slots == {("output", "output.fprop.w"), ("embedding", "output.lookup.w")}
