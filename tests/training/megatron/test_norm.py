"""Norms whose gains and results a scheme quantises, against ml_dtypes, exact arithmetic and the norm's formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from quantexp.capture import open_capture
from quantexp.capture.select.budget import price
from quantexp.config.compose import compose
from quantexp.errors import ConfigError, RunError
from quantexp.quant.precision import ModuleId, precision_map
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment
from quantexp.training.megatron.model import (
    build_model,
    scheme_modules,
    set_precision,
    use_scheme_norms,
)
from quantexp.training.megatron.session import session
from quantexp.training.megatron.specs import inject, stock_spec

from .whole_models import draw

Tiny = Callable[..., Experiment]
GAINS = "quant=more/linear_mxfp8_floor_norms"
RESULTS = "quant.norm.fprop.y={format: mxfp8_e4m3, scale_rule: floor}"


def mxfp8_floor(x: np.ndarray) -> np.ndarray:
    """OCP MX v1.0, section 6.3, with the elements of ml_dtypes: blocks of 32 along the last axis, saturating."""
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, 32)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    scale = 2.0 ** (np.floor(np.log2(np.where(amax == 0, 1.0, amax))) - 8)
    element = np.clip(blocks / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return (element.astype(np.float64) * scale).reshape(x.shape)


@contextmanager
def built(experiment: Experiment) -> Iterator[Any]:
    """The model with initial weights and gains around 0.95 under its scheme."""
    generator = torch.Generator().manual_seed(3)
    with session(experiment.training):
        spec = inject(stock_spec(experiment.model))
        gpt, _ = build_model(experiment.model, experiment.training, spec, experiment.quant)
        draw(gpt, experiment.model)
        set_precision(gpt, precision_map(experiment.model, experiment.quant))
        for name, parameter in gpt.named_parameters():
            if "norm" in name:
                spread = torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(0.95 + 0.1 * spread)
        yield gpt


def norms(gpt: Any) -> dict[str, Any]:
    modules = {str(name): module for name, module in scheme_modules(gpt).items()}
    return {name: module for name, module in modules.items() if name.endswith("norm")}


def test_every_norm_of_a_model_is_in_the_map(tiny: Tiny) -> None:
    with built(tiny(GAINS, "model.qk_norm=true")) as gpt:
        names = list(norms(gpt))
    assert sorted(names) == sorted(
        [
            *(f"layer {n} {name}-norm" for n in (0, 1) for name in ("attention", "q", "k", "mlp")),
            "final-norm",
        ]
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gain_and_result_are_rounded_and_gradients_go_straight_through(
    tiny: Tiny, precision: str
) -> None:
    """The norm before rounding may differ from its formula by three roundings; gradients, in fp32, by sums of 128."""
    with built(tiny(GAINS, RESULTS, f"training.precision={precision}")) as gpt:
        norm = norms(gpt)["layer 1 mlp-norm"]
        dtype = norm.weight.dtype
        x = torch.randn(8, 2, 128).to(dtype).requires_grad_()
        g = torch.randn(8, 2, 128).to(dtype)
        shown: list[tuple[str, Tensor]] = []
        norm.hook = lambda _, __, name, tensor: shown.append((name, tensor.detach().clone()))
        y = norm(x)
        y.backward(g)
    seen = dict(shown)
    w, before = norm.weight.detach(), seen["output"].float().numpy()
    gain = torch.from_numpy(mxfp8_floor(w.float().numpy()))
    assert not torch.equal(gain.float(), w.float())
    assert np.array_equal(y.detach().float().numpy(), mxfp8_floor(before))
    assert not np.array_equal(y.detach().float().numpy(), before)
    wide = x.detach().double().requires_grad_()
    own_gain = gain.double().requires_grad_()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * own_gain
    expected.backward(g.double())
    unit = torch.finfo(dtype).eps / 2
    own = torch.from_numpy(before).double()
    assert ((own - expected).abs() <= 3 * unit * expected.abs() + 1e-6).all()
    if precision == "fp32":
        torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(norm.weight.grad.double(), own_gain.grad, rtol=1e-5, atol=1e-5)


def test_gains_of_one_bin_become_equal(tiny: Tiny) -> None:
    """arXiv 2506.20752: under floor, E4M3 has no value between 7/8 and 1 of a block whose amax is below 1."""
    with built(tiny(GAINS)) as gpt, torch.no_grad():
        norm = norms(gpt)["final-norm"]
        norm.weight.copy_(torch.linspace(0.877, 0.996, 128))
        x = torch.full((1, 1, 128), 1.0, dtype=norm.weight.dtype)
        (value,) = norm(x).unique().tolist()
    assert value == pytest.approx(0.875, rel=1e-5)  # eps is 1e-5


def test_capture_has_gains_and_results_in_both_forms(
    run_tiny: Callable[..., RunDir], tiny: Tiny
) -> None:
    words = (
        *(GAINS, RESULTS, "training.precision=fp32", "training.iterations=2"),
        *("training.warmup_iterations=0", "training.lr=3e-2"),
        *("capture.values=both", "capture.iterations=[2]"),
    )
    run = run_tiny(*words)
    lines = open_capture(run.tensors).with_values()
    stored = {line.name: line.metadata["bytes"] for line in lines}
    assert sum(stored.values()) == price(tiny(*words)).num_bytes
    entries = open_capture(run.tensors).select(module="mlp-norm", layer=1)
    tensors = {entry.metadata["tensor"]: entry.torch() for entry in entries}
    assert {entry.metadata["layer_type"] for entry in entries} == {"norm"}
    for name, form in (("weight", "weight_fprop"), ("output", "output_fprop")):
        assert np.array_equal(tensors[form].numpy(), mxfp8_floor(tensors[name].numpy()))
        assert not torch.equal(tensors[form], tensors[name])
    assert {"weight_fprop_scale", "output_fprop_scale"} <= tensors.keys()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "quant.norm.fprop.w={format: mxfp8, hadamard: deterministic}",
            "quant.norm.fprop.w must have no hadamard: only a matrix product undoes it",
        ),
        (
            "quant.norm={format: mxfp8, hadamard: deterministic}",
            "quant.norm.fprop.y must have no hadamard: only a matrix product undoes it",
        ),
        (
            "quant.norm.fprop.y={format: mxfp4, pre_scale: true}",
            "quant.norm.fprop.y must have no pre_scale: only a matrix product undoes it",
        ),
        (
            "quant.norm.fprop.w={format: mxfp8, scale_rule: floor, clip_gradient: true}",
            "quant.norm.fprop.w must have no clip_gradient: the gradients of",
        ),
        (
            "quant.norm.fprop.w={format: mxfp4, rounding: stochastic}",
            "quant.norm.fprop.w must have no rounding stochastic: random numbers follow",
        ),
        (
            "quant.norm.fprop.y={format: hifp8, scaling: delayed}",
            "quant.norm.fprop.y must have no scaling delayed: amax histories are those of",
        ),
        (
            "quant.norm.fprop.w={format: nvfp4_16x16}",
            "quant.norm.fprop.w must have no format nvfp4_16x16 with blocks of 16 rows: a gain is",
        ),
        (
            "quant.norm.fprop.w={format: tests.proof.lies.formats:Ternary}",
            "quant.norm.fprop.w must have no format",
        ),
        (
            "quant.norm.fprop.w.format=reuse",
            "quant.norm.fprop.w.format must not be reuse in the forward product",
        ),
        (
            "quant.norm.fprop.w={format: mxfp8, parts: [{take: mean, along: tokens, format: bf16}]}",
            "quant.norm.fprop.w",
        ),
    ],
)
def test_option_that_a_norm_cannot_have_is_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["training=fast", "model=tiny", "quant=linear_mxfp8", words], None, {})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_norm_of_another_class_is_refused_by_name(tiny: Tiny) -> None:
    experiment = tiny("quant=bf16")
    with session(experiment.training):
        spec = inject(stock_spec(experiment.model))
        gpt, _ = build_model(experiment.model, experiment.training, spec, experiment.quant)
        gpt.decoder.layers[1].input_layernorm = torch.nn.RMSNorm(128)
        with pytest.raises(RunError, match=r"layer 1 attention-norm is a torch\.nn.*RMSNorm, into"):
            use_scheme_norms(gpt, experiment.model)


def test_rules_cover_norms_by_site_module_and_layer(tiny: Tiny) -> None:
    experiment = tiny(
        "quant=linear_mxfp8",
        "quant.rules=[{sites: [norm], operands: [w], format: mxfp4}, {layers: [0], format: bf16}, "
        "{modules: [final-norm], format: mxfp8, iterations: [2, null]}]",
    )

    def formats(iteration: int) -> dict[str, str]:
        declared = precision_map(experiment.model, experiment.quant, iteration)
        return {
            entry.label: entry.spec.fmt.name
            for name, module in declared.items()
            for entry in module.entries()
            if name.name.endswith("norm")
        }

    first, second = formats(1), formats(2)
    assert first["layer 0 mlp-norm norm.fprop.w"] == "bf16"
    assert first["layer 1 mlp-norm norm.fprop.w"] == "mxfp4_e2m1"
    assert first["layer 1 mlp-norm norm.fprop.y"] == "bf16"
    assert first["final-norm norm.fprop.w"] == "mxfp4_e2m1"
    assert second["final-norm norm.fprop.y"] == second["final-norm norm.fprop.w"] == "mxfp8_e4m3"
    assert ModuleId(2, "final-norm") in precision_map(experiment.model, experiment.quant)


def test_schemes_without_norms_keep_their_map_and_class(tiny: Tiny) -> None:
    experiment = tiny("quant=linear_mxfp8")
    declared = precision_map(experiment.model, experiment.quant)
    assert not any(name.name.endswith("norm") for name in declared)
    with built(experiment) as gpt:
        assert not norms(gpt)
