"""The schemes of `quant/more`, from the captured files alone: other formats, and operands that depend on the moment.

The capture contains everything that recomputing needs: seed and offset of stochastic rounding, the signs of a random
Hadamard transform, the amax of the iterations before. Every element of each result lies within the bounds that `bounds`
derives; if any of those numbers is misread, some element does not, which shows that the run used the captured numbers.

Backward products of attention whose gradient dS is quantised cannot be recomputed so sharply from q, k and v: an
element that rounds to either of two neighbours in dS may be rounded anywhere afterwards. `test_operands` repeats them
from the captured dS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from quantexp.runs.paths import RunDir

from .bounds import share_outside
from .captured import Module, Slot, read_capture
from .oracle import (
    ATTENTION,
    CONTEXT,
    LINEAR,
    Recompute,
    beyond_six,
    captured_operand,
    operand,
    rounding,
)
from .test_schemes import MODEL, SHOWN_BY

pytestmark = pytest.mark.slow

Run = Callable[..., RunDir]

MXFP4 = {"format": "mxfp4_e2m1", "block": 32, "scale_rule": "floor"}
NVFP4 = {"format": "nvfp4_e2m1", "block": 16, "scaling": "exact"}
TILES = {
    "format": "nvfp4_16x16",
    "definition": '{"block": [16, 16], "element": "e2m1", "scale": "e4m3", "tensor_scale": "fp32"}',
    "scaling": "exact",
}
UE5M3 = {
    "format": "fp4_ue5m3",
    "definition": '{"block": 16, "element": "e2m1", "scale": "ue5m3"}',
    "block": 16,
}
FP8 = {"scaling": "exact", "saturate": True, "rounding": "even"}
E4M3 = {"format": "fp8_e4m3", "amax_target": 448.0, **FP8}
E5M2 = {"format": "fp8_e5m2", "amax_target": 57344.0, **FP8}
HIFP8 = {
    "format": "hifp8",
    "scaling": "delayed",
    "window": 16,
    "saturate": True,
    "rounding": "away",
}
SR_RHT = {"rounding": "stochastic", "pre_scale": True, "hadamard": "random", "hadamard_block": 64}
DRAWN_PART = {"rounding": "stochastic", "pre_scale": 16 / 17}
DETERMINISTIC = {"hadamard": "deterministic", "hadamard_block": 32}
RANDOM16 = {"hadamard": "random", "hadamard_block": 16}
EVEN = {"rounding": "even"}
BF16 = {"format": "bf16"}
LINEAR_SLOTS = ("fprop.x", "fprop.w", "dgrad.g", "dgrad.w", "wgrad.g", "wgrad.x")


def linear(*slots: Slot) -> dict[str, Slot]:
    """Six slots in the order of the products; one for all of them."""
    return dict(zip(LINEAR_SLOTS, slots if len(slots) == 6 else slots * 6, strict=True))


#: scheme -> the declarations of its linear slots, written down a second time; unnamed options are not set.
SCHEMES: dict[str, dict[str, Slot]] = {
    "linear_mxfp6": linear({"format": "mxfp6_e2m3", "block": 32, "scale_rule": "floor", **EVEN}),
    "linear_mxfp6_e3m2": linear(
        {"format": "mxfp6_e3m2", "block": 32, "scale_rule": "floor", **EVEN}
    ),
    "linear_mxfp8_hybrid": {
        slot: {
            "format": "mxfp8_e5m2" if slot.endswith("g") else "mxfp8_e4m3",
            "block": 32,
            "scale_rule": "rceil",
            **EVEN,
        }
        for slot in LINEAR_SLOTS
    },
    "linear_nvfp4": linear({**NVFP4, **EVEN}),
    "linear_fp8": linear(E4M3, E4M3, E5M2, E4M3, E5M2, E4M3),
    "linear_mxfp4_hadamard": linear(
        *[{**MXFP4, **EVEN}] * 4, *[{**MXFP4, **EVEN, **DETERMINISTIC}] * 2
    ),
    "linear_mxfp4_sr_rht": linear(BF16, BF16, *[{**MXFP4, **SR_RHT}] * 4),
    "linear_nvfp4_recipe": linear(
        {**NVFP4, **EVEN},
        {**TILES, **EVEN},
        {**NVFP4, "rounding": "stochastic"},
        {**TILES, **EVEN},
        {**NVFP4, "rounding": "stochastic", **RANDOM16},
        {**NVFP4, **EVEN, **RANDOM16},
    ),
    "linear_nvfp4_of_forward": linear(
        *[{**NVFP4, **EVEN}] * 2,
        {**NVFP4, "rounding": "stochastic"},
        {**NVFP4, **EVEN, "of": "forward"},
        {**NVFP4, "rounding": "stochastic", **RANDOM16},
        {**NVFP4, **EVEN, **RANDOM16},
    ),
    "linear_nvfp4_tetrajet_v2": linear(
        *[{**NVFP4, **EVEN}] * 2,
        *[
            {**NVFP4, **part, "hadamard": "random", "hadamard_block": 32}
            for part in (DRAWN_PART, {**DRAWN_PART, "of": "forward"}) * 2
        ],
    ),
    "linear_mxfp4_quartet": linear(
        *[{**MXFP4, **EVEN, **DETERMINISTIC, "clip_gradient": True}] * 2,
        *[
            {**MXFP4, **SR_RHT, "hadamard_block": 32, **of}
            for of in ({}, {"of": "forward"}, {}, {"of": "forward"})
        ],
    ),
    "linear_mxfp4_quest": linear(
        *[{**MXFP4, **EVEN, **DETERMINISTIC, "clip_gradient": True}] * 2,
        *(BF16, {**MXFP4, **EVEN, **DETERMINISTIC}),
        *(BF16, {**MXFP4, **EVEN, **DETERMINISTIC}),
    ),
    "linear_fp4_ue5m3": {
        slot: {**UE5M3, "rounding": "stochastic" if slot.endswith("g") else "even"}
        for slot in LINEAR_SLOTS
    },
}
MEAN = {"parts": [{"take": "mean", "along": "tokens", **BF16}]}
MXFP8 = {"format": "mxfp8_e4m3", "block": 32, "scale_rule": "rceil", "rounding": "even"}
OUTLIERS = {"parts": [{"take": "elements", "share": 0.01, **MXFP8}]}


def hot(along: str) -> Slot:
    return {
        "parts": [{"take": "channels", "along": along, "share": 0.1, "from_error": True, **BF16}]
    }


#: Schemes with operands that are sums of parts.
PARTS: dict[str, dict[str, Slot]] = {
    "linear_nvfp4_averis": {
        slot: {**NVFP4, **EVEN, **({} if slot.endswith("w") else MEAN)} for slot in LINEAR_SLOTS
    },
    "linear_nvfp4_hot_channels": {
        slot: {**NVFP4, **EVEN, **_hot.get(slot, {})}
        for _hot in [{"fprop.x": hot("tokens"), "fprop.w": hot("output_width")}]
        for slot in LINEAR_SLOTS
    },
    "linear_mxfp4_outliers": {
        slot: {**MXFP4, **EVEN, **({} if slot.endswith("w") else OUTLIERS)} for slot in LINEAR_SLOTS
    },
}
SCHEMES |= PARTS
#: Schemes whose scales come from earlier iterations, which the third has.
DELAYED: dict[str, dict[str, Slot]] = {
    "linear_hifp8_delayed": {
        slot: {**HIFP8, "amax_target": 224.0 if slot.endswith("g") else 15.0}
        for slot in LINEAR_SLOTS
    },
    "linear_fp8_delayed": {
        slot: {**(E5M2 if slot.endswith("g") else E4M3), "scaling": "delayed", "window": 16}
        for slot in LINEAR_SLOTS
    },
}
#: The keys that a capture adds to a slot's options.
OF_THE_MOMENT = {"seed", "offset", "signs", "amax"}
IRRELEVANT = {"axis", "reuse"}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_linear_results_follow_from_the_captured_operands(run_tiny: Run, scheme: str) -> None:
    words = [f"quant=more/{scheme}", "quant.rules=[]", *MODEL]
    modules = read_capture(run_tiny(*words).tensors)
    _linear_results_follow(modules, SCHEMES[scheme])


@pytest.mark.parametrize("scheme", DELAYED)
def test_delayed_scales_follow_from_the_amax_in_the_capture(run_tiny: Run, scheme: str) -> None:
    run = run_tiny(
        f"quant=more/{scheme}",
        *MODEL,
        "training.iterations=4",
        "training.lr=0.01",
        "capture.first_iteration=3",
    )
    modules = read_capture(run.tensors, iteration=3)
    for module in modules:
        if module.layer_type == "linear":
            for slot in module.formats.values():
                assert slot["amax"] > 0
    _linear_results_follow(modules, DELAYED[scheme])


def _linear_results_follow(modules: list[Module], declared: Mapping[str, Slot]) -> None:
    layers = [module for module in modules if module.layer_type == "linear"]
    assert len(layers) == 8
    for module in layers:
        assert _options(module) == declared, module
        _follow(module, LINEAR)
        if module.layer == 0:
            _misreadings_are_noticed(module)


@pytest.mark.parametrize("choice", ["mxfp6", "nvfp4", "fp8"])
def test_attention_results_follow_from_the_captured_operands(run_tiny: Run, choice: str) -> None:
    run = run_tiny(f"quant=more/FA_linear_{choice}", *MODEL)
    _attention_results_follow(run, ATTENTION)


def test_attention_results_follow_from_a_key_without_its_mean(run_tiny: Run) -> None:
    run = run_tiny("quant=more/FA_mxint8_smooth_k", "quant.qk.fprop.q.format=mxfp8", *MODEL)
    _attention_results_follow(run, ATTENTION)


@pytest.mark.parametrize("choice", ["mxfp6", "nvfp4", "fp8"])
def test_a_quantised_pv_follows_from_the_captured_weights_and_value(
    run_tiny: Run, choice: str
) -> None:
    run = run_tiny("quant=bf16", f"quant/pv={choice}", *MODEL)
    _attention_results_follow(run, CONTEXT)


def test_gradients_of_saturated_elements_are_clipped_where_declared(run_tiny: Run) -> None:
    """dx is 0 where x lay beyond 6 2^s, and nowhere else changed; dw likewise."""
    run = run_tiny("quant=linear_mxfp4", "quant.linear.clip_gradient=true", *MODEL)
    layers = [m for m in read_capture(run.tensors) if m.layer_type == "linear"]
    assert len(layers) == 8
    for module in layers:
        for name, result in (("x", ("backward", "grad_input")), ("w", ("backward", "grad_weight"))):
            assert module.formats[f"fprop.{name}"]["clip_gradient"] is True
            beyond = beyond_six(captured_operand(module, name))
            right = LINEAR[result](module, module.formats).each(
                lambda value, beyond=beyond: np.where(beyond, 0.0, value)  # type: ignore[misc]
            )
            assert 0.005 < np.mean(beyond) < 0.2
            assert share_outside(module.tensors[result], right, module.dtype) == 0


def test_the_weights_gradient_has_the_slope_of_the_estimator(run_tiny: Run) -> None:
    """dw is the product of both operands times DGE's factor (arXiv 2501.17116, equation 8) of w over its scale."""
    run = run_tiny("quant=linear_mxfp4", "quant.linear.fprop.w.dge=5", *MODEL)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for module in read_capture(run.tensors):
        if module.layer_type == "linear":
            assert module.formats["fprop.w"]["dge"] == 5
            w = np.abs(captured_operand(module, "w"))
            amax = np.maximum.reduceat(
                w, range(0, w.shape[-1], 32), axis=-1
            )  # the last block may be short
            _, exponent = np.frexp(np.repeat(amax, 32, axis=-1)[..., : w.shape[-1]])
            v = w / np.exp2(exponent - 3.0)
            above = np.clip(np.searchsorted(grid, v, side="right"), 1, 7)
            low, high = grid[above - 1], grid[above]
            with np.errstate(divide="ignore"):
                slope = np.abs(2 * (v - low) / (high - low) - 1) ** (1 / 5 - 1) / 5
            factor = np.where(v > 6, 0.0, np.minimum(slope, 3.0))
            key = ("backward", "grad_weight")
            dw = LINEAR[key](module, module.formats)
            # dw is rounded before it is multiplied
            right = dw.each(rounding(module)).each(
                lambda value, factor=factor: value * factor  # type: ignore[misc]
            )
            assert share_outside(module.tensors[key], right, module.dtype) == 0


FP4_OF_THE_MOMENT = (
    "{format: mxfp4, rounding: stochastic, pre_scale: true, hadamard: random, hadamard_block: 16}"
)


@pytest.mark.parametrize("product", ["fprop", "dgrad_p"])
def test_stochastic_transformed_attention_follows_too(run_tiny: Run, product: str) -> None:
    """Of P and v, and of dO and v, whose numbers are counted by head."""
    left = "P" if product == "fprop" else "dO"
    words = [f"quant.pv.{product}.{name}={FP4_OF_THE_MOMENT}" for name in (left, "v")]
    run = run_tiny("quant=bf16", *words, *MODEL)
    _attention_results_follow(run, CONTEXT)


def test_stochastic_transformed_scores_follow_too(run_tiny: Run) -> None:
    words = [f"quant.qk.fprop.{name}={FP4_OF_THE_MOMENT}" for name in ("q", "k")]
    run = run_tiny("quant=bf16", *words, *MODEL)
    _attention_results_follow(run, {("forward", "output"): ATTENTION["forward", "output"]})


def _attention_results_follow(run: RunDir, results: Mapping[tuple[str, str], Recompute]) -> None:
    modules = [m for m in read_capture(run.tensors) if m.layer_type == "attention"]
    assert len(modules) == 2
    for module in modules:
        _follow(module, results)


def _follow(module: Module, results: Mapping[tuple[str, str], Recompute]) -> None:
    for key, recompute in results.items():
        right = recompute(module, module.formats)
        what = f"{module} {' '.join(key)}"
        assert module.tensors[key].shape == right.nominal.shape, what
        assert share_outside(module.tensors[key], right, module.dtype) == 0, what


def _options(module: Module) -> dict[str, Slot]:
    """The declaration of each slot, without unset options and those that the moment adds."""
    return {
        name: {
            key: [_set(part) for part in value] if key == "parts" else value
            for key, value in _set(slot).items()
        }
        for name, slot in module.formats.items()
    }


def _set(slot: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a slot, or of a part, that are set."""
    return {
        key: value
        for key, value in slot.items()
        if value is not None and key not in OF_THE_MOMENT | IRRELEVANT
    }


def _misreadings_are_noticed(module: Module) -> None:
    """Misreading one number of one slot puts some element of the product's result outside the bounds."""
    for name, declared in module.formats.items():
        key, recompute = SHOWN_BY[name.rpartition(".")[0]]
        for misread in _misread(declared):
            value = recompute(module, {**module.formats, name: misread})
            outside = share_outside(module.tensors[key], value, module.dtype)
            assert outside > 0, f"{module} {name} read as {misread}"


def _misread(slot: Slot) -> Iterator[dict[str, Any]]:
    if "seed" in slot:
        yield {**slot, "seed": slot["seed"] ^ 1}
        yield {**slot, "offset": slot["offset"] + 1}
        yield {**slot, "rounding": "even"}
    if "signs" in slot:
        yield {**slot, "signs": [-slot["signs"][0], *slot["signs"][1:]]}
    if "hadamard" in slot:
        yield {**slot, "hadamard_block": slot["hadamard_block"] // 2, **_half(slot)}
        yield {k: v for k, v in slot.items() if k not in ("hadamard", "signs")}
    if slot.get("of"):
        yield {**slot, "of": None}
    if "parts" in slot:
        yield {**slot, "parts": None}
        coarser = [{**part, **MXFP4, **EVEN} for part in slot["parts"] if part["format"] == "bf16"]
        yield from [{**slot, "parts": coarser}] if coarser else []
    if slot.get("pre_scale"):
        yield {**slot, "pre_scale": None}
    if slot["format"].startswith("fp8") and slot["scaling"] == "exact":
        yield {**slot, "amax_target": slot["amax_target"] * 0.75}
    if slot["scaling"] == "delayed" and slot["format"] == "hifp8":
        yield {**slot, "amax": slot["amax"] * 4}


def _half(slot: Slot) -> dict[str, Any]:
    return {"signs": slot["signs"][: slot["hadamard_block"] // 2]} if "signs" in slot else {}


def test_captured_tensors_are_those_before_the_transform(run_tiny: Run) -> None:
    modules = read_capture(run_tiny("quant=more/linear_mxfp4_hadamard", *MODEL).tensors)
    layers = [module for module in modules if module.layer_type == "linear"]
    assert len(layers) == 8
    for module in layers:
        x = captured_operand(module, "x")
        moved = operand(module, module.formats, "wgrad.x")
        assert np.mean(moved != x) > 0.9
