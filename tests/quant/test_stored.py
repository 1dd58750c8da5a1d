"""Operands that are quantised from a stored copy of their tensor (`of: FORMAT`): numpy's mxfp4, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from quantexp.config.compose import compose
from quantexp.errors import ConfigError
from quantexp.formats import quantise
from quantexp.formats.types import Axis
from quantexp.quant.linear import dgrad, fprop, input_copies, wgrad
from quantexp.quant.precision import precision_map
from quantexp.quant.records import spec_record
from quantexp.quant.sites import DGRAD_G, FPROP_W, FPROP_X, WGRAD_X
from quantexp.quant.step_state import StepState, use_step_state
from quantexp.quant.weight_cache.buffers import Buffers

from .test_of_forward import Array, close, declared, mxfp4, tensors

RECIPE = "quant=more/linear_fp8_block_stored_mxfp4"


@pytest.fixture(autouse=True)
def _state() -> Iterator[None]:
    with use_step_state(StepState(1, 1, 0)):
        yield


def matrices() -> tuple[Array, Array, Array]:
    x, w, g = (t.double().numpy().reshape(-1, t.shape[-1]) for t in tensors())
    return x, w, g


def mxfp8(x: Array) -> Array:
    """Along the last axis."""
    return (
        quantise(torch.from_numpy(x.copy()).float(), "mxfp8", scale_rule="rceil").double().numpy()
    )


def test_an_operand_is_quantised_from_the_copy_along_its_rows() -> None:
    precision = declared("quant=linear_mxfp8", "quant.linear.of=mxfp4")
    (x, w, g), (X, W, G) = tensors(), matrices()
    X_s, G_s = mxfp4(X)[0], mxfp4(G)[0]
    close(fprop(precision, x, w), mxfp8(X_s) @ mxfp8(W).T)
    close(dgrad(precision, g, w), mxfp8(G_s) @ mxfp8(W.T).T)
    close(wgrad(precision, g, x), mxfp8(G_s.T) @ mxfp8(X_s.T).T)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("format: bf16", lambda x: x),
        ("of: high", lambda x: mxfp8(x.T).T),
        ("format: reuse", lambda x: mxfp8(mxfp4(x)[0])),
        ("of: forward", lambda x: mxfp8(mxfp8(mxfp4(x)[0]).T).T),
        ("of: mxfp4", lambda x: mxfp8(mxfp4(x)[0].T).T),
    ],
)
def test_wgrad_takes_the_tensor_the_stored_copy_or_the_forward_one(
    own: str, expected: Callable[[Array], Array]
) -> None:
    precision = declared(
        "quant=linear_mxfp8",
        f"quant.linear={{fprop: {{x: {{of: mxfp4}}}}, wgrad: {{x: {{{own}}}}}}}",
    )
    (x, _, g), (X, _, G) = tensors(), matrices()
    _, copy = input_copies(precision, x, None, Buffers())
    for quantised_x in (None, copy):
        close(wgrad(precision, g, x, quantised_x=quantised_x), mxfp8(G.T) @ expected(X))


def test_the_recipe_multiplies_mxfp4_activations_in_fp8() -> None:
    """E4M3 under powers of two has the values of mxfp4 (arXiv 2603.02731): what is sent is what is multiplied."""
    (x, w, g), (X, _, _) = tensors(), matrices()
    precision = declared(RECIPE)
    W, G = (
        quantise(t.reshape(-1, t.shape[-1]), precision.spec(slot), axis=axis).double().numpy()
        for t, slot, axis in ((w, FPROP_W, -1), (g, DGRAD_G, 0))
    )
    close(fprop(precision, x, w), mxfp4(X)[0] @ W.T)
    close(wgrad(precision, g, x), G.T @ mxfp4(X)[0])


def test_the_map_has_the_format_and_its_definition() -> None:
    spec = declared("quant=linear_mxfp8", "quant.linear.wgrad.x.of=mxfp4").spec(WGRAD_X)
    assert spec.of is not None
    assert (spec.of.axis, spec.copy, spec_record(spec)["of"]) == (
        Axis.INPUT_WIDTH,
        None,
        "mxfp4_e2m1",
    )
    own = "+quant.formats.mine={element: int4, block: 16}"
    record = spec_record(
        declared("quant=linear_mxfp8", own, "quant.linear.fprop.x.of=mine").spec(FPROP_X)
    )
    assert record["of"] == "mine"
    assert '"int4"' in str(record["of_definition"])


def test_a_site_or_a_rule_brings_it_to_x_and_g_alone() -> None:
    experiment = compose(
        ["quant=FA_linear_mxfp8", "quant.rules=[{modules: [fc2], of: mxfp4}]"], None, {}
    )
    stored = {
        (name.name, str(slot))
        for name, module in precision_map(experiment.model, experiment.quant).items()
        for slot, spec in module.slots.items()
        if spec.of is not None
    }
    slots = ("fprop.x", "dgrad.g", "wgrad.g", "wgrad.x")
    assert stored == {("fc2", f"linear.{slot}") for slot in slots}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("quant.linear.fprop.x.of=fp3", "quant.linear.fprop.x.of must be high, forward or one of"),
        ("quant.linear.fprop.x.of=forward", "must not be forward in the forward product"),
        (
            "quant.linear.fprop.w.of=mxfp4",
            "x and g of linear layers are stored or sent, got it for",
        ),
        ("quant.qk={format: mxfp8, fprop: {q: {of: mxfp4}}}", "got it for qk.fprop.q; take high"),
        ("quant.linear.fprop.x.of=bf16", "must not be bf16, which is the tensor itself"),
        ("quant.linear.dgrad.g.of=nvfp4_16x16", "of must round to nearest, in blocks of one row"),
        (
            "quant.linear.fprop.x={of: mxfp4, parts: [{take: mean, along: tokens, format: bf16}]}",
            "do not go with of=a stored copy: parts are taken of the tensor in high precision",
        ),
        (
            "quant.linear.fprop.x={format: mxfp4, of: mxfp8, clip_gradient: true}",
            "clip_gradient has no meaning for a stored copy, whose values saturate",
        ),
        (
            "quant={backend: transformer_engine, linear: {of: mxfp4}}",
            "linear.fprop.x has options of=a stored copy, and MXFP8BlockScaling(E4M3)",
        ),
    ],
)
def test_what_has_no_stored_copy_is_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["quant=linear_mxfp8", words], None, {})
    assert message in str(caught.value)
