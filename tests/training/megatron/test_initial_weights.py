"""Initial weights: Megatron's distributions and attributes, each parameter from a generator of its own."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import megatron.core
import pytest
import torch
from safetensors.torch import load_file

from quantexp.config.compose import compose
from quantexp.model.huggingface.mapping import mapping, published
from quantexp.model.huggingface.weights import open_weights
from quantexp.model.safetensors import write_safetensors
from quantexp.model.shards import Shard
from quantexp.quant.step_state import seed_of
from quantexp.schema import Experiment, ModelConfig, Precision
from quantexp.training.megatron import model as model_module
from quantexp.training.megatron.initial_weights import load_initial_weights, perturb_weights
from quantexp.training.megatron.model import build_model
from quantexp.training.megatron.parameters import mark_divided
from quantexp.training.megatron.session import session
from quantexp.training.megatron.specs import stock_spec
from quantexp.training.megatron.transformer_config import DTYPES, transformer_config
from tests.model.huggingface.memory import bytes_of_loading
from tests.model.huggingface.published import (
    FAMILIES,
    LLAMA31,
    as_model,
    of_folder,
    published_model,
    training,
    write,
)
from tests.training.megatron.whole_models import load as load_whole
from tests.training.megatron.whole_models import saved_tensors

from .whole_models import draw, parts

Tiny = Callable[..., Experiment]
ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride")


@pytest.fixture(params=["llama32-1b", "deepseek2_lite", "qwen2", "qwen3_moe"])
def experiment(
    request: pytest.FixtureRequest, tiny: Tiny, tiny_models: dict[str, list[str]]
) -> Experiment:
    more = ["model.mla.q_lora_rank=24"] if request.param == "deepseek2_lite" else []
    return tiny(*tiny_models[request.param], *more, "training.precision=fp32")


def build(experiment: Experiment) -> Any:
    return build_model(experiment.model, experiment.training, stock_spec(experiment.model))[0]


def megatrons(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model with the weights that Megatron gives it."""
    ours = transformer_config
    with monkeypatch.context() as patch:
        patch.setattr(
            model_module,
            "transformer_config",
            lambda *args: dataclasses.replace(ours(*args), perform_initialization=True),
        )
        return build(experiment)


def test_weights_have_megatrons_distributions(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standard deviation of n draws is off by 1 / sqrt(2 n) of itself, the mean by std / sqrt(n), typically.

    The limits are 5 times that, of two samples for the deviation. The smallest matrix, a router, has 512 elements, so
    the limit is 22%; with 2 layers a wrong choice of the deviation is off by a factor of 2.
    """
    with session(experiment.training):
        theirs = dict(megatrons(experiment, monkeypatch).named_parameters())
        ours = dict(draw(build(experiment), experiment.model).named_parameters())
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        if tensor.dim() == 1:
            assert torch.equal(tensor, theirs[name]), name
            continue
        n, std = tensor.numel(), float(theirs[name].detach().std())
        assert abs(float(tensor.detach().std()) / std - 1) < 5 * n**-0.5, name
        assert abs(float(tensor.detach().mean())) < 5 * std * n**-0.5, name


def test_divided_parameters_have_megatrons_attributes(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Megatron-Core 0.15 has a stride of 1 for the two halves of fc1, too; its Megatron-FSDP alone reads it.
    compared = ATTRIBUTES[: 2 if megatron.core.__version__.startswith("0.15") else 3]

    def attributes(gpt: Any) -> dict[str, list[object]]:
        named = gpt.named_parameters()
        return {name: [getattr(p, a, None) for a in compared] for name, p in named}

    with session(experiment.training):
        theirs, ours = megatrons(experiment, monkeypatch), build(experiment)
        mark_divided(parts(ours, experiment.model))
    assert attributes(ours) == attributes(theirs)


def test_each_parameter_follows_from_the_seed_and_its_name(experiment: Experiment) -> None:
    with session(experiment.training):
        weights = dict(draw(build(experiment), experiment.model, 7).named_parameters())
    name = "decoder.layers.1.self_attention.linear_proj.weight"
    seed = int(hashlib.sha256(f"7 {name}".encode()).hexdigest()[:16], 16)
    generator = torch.Generator().manual_seed(seed)
    std = experiment.model.init_std / 2  # sqrt(2 * 2 layers)
    expected = torch.empty(weights[name].shape).normal_(0, std, generator=generator)
    assert torch.equal(weights[name], expected)


def test_another_seed_gives_other_weights_and_16_bits_are_rounded_to_the_nearest(
    tiny: Tiny,
) -> None:
    fp32, bf16 = tiny("training.precision=fp32"), tiny("training.precision=bf16")
    with session(fp32.training):
        first, second = (
            dict(draw(build(fp32), fp32.model, seed).named_parameters()) for seed in (1, 2)
        )
        rounded = dict(draw(build(bf16), bf16.model, 1).named_parameters())
    for name, tensor in first.items():
        assert torch.equal(rounded[name], tensor.to(rounded[name].dtype)), name
        assert tensor.dim() == 1 or not torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("name", ["llama31-8b", "deepseek2_lite"])
def test_no_two_parameters_of_a_shipped_model_begin_with_the_same_numbers(name: str) -> None:
    """torch's generator takes 32 bits of a seed, so names alone do not exclude it."""
    experiment = compose([f"model={name}"], None, {})
    seeds = [seed_of(experiment.training.seed, p.name) for p in mapping(experiment.model)]
    assert len({seed % 2**32 for seed in seeds}) == len(seeds)


def test_model_that_megatron_builds_is_not_initialised_by_it(tiny: Tiny) -> None:
    """Otherwise building would draw every weight twice."""
    experiment = tiny()
    config = transformer_config(experiment.model, experiment.training)
    assert not config.perform_initialization


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_perturbed_weights_differ_in_the_last_bit_of_one_element_in_a_hundred(
    tiny: Tiny, precision: str
) -> None:
    """Of 80,000 elements 1% is 800, and 28 a standard deviation of that number."""
    experiment = tiny(f"training.precision={precision}")
    with session(experiment.training):
        plain, moved = (draw(build(experiment), experiment.model) for _ in range(2))
        plain.embedding.word_embeddings.weight.data[:, :9] = 0
        moved.embedding.word_embeddings.weight.data[:, :9] = 0
        perturb_weights(
            parts(moved, experiment.model), dataclasses.replace(experiment.training, chaos=1)
        )
    number, changed, of_norms = 0, 0, 0
    dtype = DTYPES[experiment.training.precision]  # to which Megatron rounds norms later
    pairs = [(n, x.data.to(dtype)) for n, x in plain.named_parameters()]
    for (name, x), y in zip(pairs, (p.data.to(dtype) for p in moved.parameters()), strict=True):
        away = torch.nextafter(x.float(), x.float() * 2) if precision == "fp32" else None
        is_moved = x != y
        assert not is_moved[x == 0].any(), name
        number, changed = number + int((x != 0).sum()), changed + int(is_moved.sum())
        bits = {2: torch.int16, 4: torch.int32}[x.element_size()]
        steps = x.view(bits).long() - y.view(bits).long()
        of_norms += int(is_moved.sum()) if x.dim() == 1 else 0
        assert set(steps[is_moved].unique().tolist()) <= {-1, 1}, name
        if away is not None:
            assert torch.equal(y[steps == -1], away[steps == -1]), name
    assert number > 80_000
    assert of_norms
    assert abs(changed - 0.01 * number) < 5 * (0.01 * number) ** 0.5


def test_a_rank_perturbs_its_part_as_one_process_does(tiny: Tiny) -> None:
    experiment = tiny("training.precision=fp32")
    with session(experiment.training):
        gpt = draw(build(experiment), experiment.model)
        whole = parts(gpt, experiment.model)
        name = "decoder.layers.0.mlp.linear_fc1.weight"
        part = whole[name]
        shard = Shard(0, ((0, 96), (192, 288)))
        tensor = torch.nn.Parameter(torch.cat([part.tensor[:96], part.tensor[192:288]]).detach())
        chaos = dataclasses.replace(experiment.training, chaos=1)
        perturb_weights(whole, chaos)
        perturb_weights({name: dataclasses.replace(part, shard=shard, tensor=tensor)}, chaos)
    assert torch.equal(tensor, torch.cat([part.tensor[:96], part.tensor[192:288]]))


def test_another_number_or_seed_perturbs_other_elements(tiny: Tiny) -> None:
    def built(*words: str) -> dict[str, torch.Tensor]:
        experiment = tiny(*words)
        with session(experiment.training):
            gpt = build(experiment)
            load_initial_weights([gpt], experiment)
            return {name: x.detach().clone() for name, x in gpt.named_parameters()}

    runs = [built(*words) for words in ([], ["training.chaos=1"], ["training.chaos=2"])]
    again = built("training.chaos=1")
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert torch.equal(runs[1][name], again[name])
    moved = [run[name] != runs[0][name] for run in runs[1:]]
    assert all(each.any() for each in moved)
    assert not torch.equal(moved[0], moved[1])


def load(model: ModelConfig, precision: Precision, use: Callable[[Any], None]) -> None:
    with session(training(precision)):
        gpt, _ = build_model(model, training(precision), stock_spec(model))
        load_whole(gpt, model)
        use(gpt)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", [Precision.bf16, Precision.fp32])
def test_round_trip_keeps_every_bit(family: str, precision: Precision, tmp_path: Path) -> None:
    dtype = DTYPES[precision]
    config = FAMILIES[family]
    write(published_model(config).to(dtype), config, tmp_path, max_shard_size="50KB")
    weights = open_weights(tmp_path)
    expected: dict[str, torch.Tensor] = {}
    for file in weights.files:
        expected |= load_file(file)

    def use(gpt: Any) -> None:
        model = of_folder(tmp_path)
        saved = saved_tensors(gpt, model, precision, tmp_path / "saved")
        tensors = {name: saved.tensor(name) for name in published(mapping(model))}
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert tensor.dtype == dtype
            assert torch.equal(tensors[name], tensor), name

    load(of_folder(tmp_path), precision, use)


def test_other_dtypes_are_rounded_to_the_nearest(tmp_path: Path) -> None:
    write(published_model(LLAMA31), LLAMA31, tmp_path)
    expected = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]

    def use(gpt: Any) -> None:
        assert torch.equal(gpt.embedding.word_embeddings.weight[:201], expected.bfloat16())

    load(of_folder(tmp_path), Precision.bf16, use)


def test_padding_of_the_vocabulary_is_zero(tmp_path: Path) -> None:
    write(published_model(LLAMA31), LLAMA31, tmp_path)

    def use(gpt: Any) -> None:
        for layer in (gpt.embedding.word_embeddings, gpt.output_layer):
            assert layer.weight.shape[0] == 256
            assert layer.weight[:201].count_nonzero() > 0
            assert layer.weight[201:].count_nonzero() == 0

    load(of_folder(tmp_path), Precision.fp32, use)


@pytest.mark.slow
def test_weights_are_never_in_memory_twice(tmp_path: Path) -> None:
    """Measures the peak resident set, which includes the files' mapped pages.

    The pages of the largest parameter, 6% of the model, are in memory besides it; the limit is 20%. Loading runs in its
    own process, since this one may reuse memory that earlier tests freed.
    """
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the kernel does not reset the peak resident set")
    config = {
        **LLAMA31,
        "vocab_size": 128,
        "hidden_size": 576,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
    }
    index: dict[str, dict[str, torch.Tensor]] = {}
    shapes, size = published(mapping(as_model(config))), 0
    for number, (name, shape) in enumerate(shapes.items()):
        file = f"model-{2 * number // len(shapes)}.safetensors"
        index.setdefault(file, {})[name] = torch.ones(shape, dtype=torch.bfloat16)
        size += index[file][name].nbytes
    for file, tensors in index.items():
        write_safetensors(tmp_path / file, tensors, {})
    names = {name: file for file, tensors in index.items() for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        grown = pool.submit(bytes_of_loading, tmp_path, config).result()
    assert size > 110e6
    assert 0.5 * size < grown < 1.2 * size
