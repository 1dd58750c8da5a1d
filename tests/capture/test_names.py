from __future__ import annotations

from collections.abc import Callable

import pytest

from quantexp.capture.names import TensorName, formats_record, quant_type, short_name
from quantexp.formats import QuantSpec, get_format
from quantexp.quant.precision import ModuleId, precision_map
from quantexp.quant.step_state import StepState, seed_of
from quantexp.schema import Experiment


def test_an_attention_tensor_has_the_nine_segments_of_the_contract() -> None:
    name = TensorName(0, "attention", "forward", "pre", "query", "mxfp8")
    assert (
        name.file("20250908_095220", 1)
        == "mxfp8/20250908_095220_0001_attention_L0_forward_pre_FA_mxfp8_query.pt"
    )


def test_a_linear_tensor_names_its_module() -> None:
    name = TensorName(3, "fc1", "backward", "post", "grad_input", "hifp8")
    assert (
        name.file("20250908_095220", 12345)
        == "hifp8/20250908_095220_12345_linear_L3-fc1_backward_post_linear_hifp8_grad_input.pt"
    )


def test_the_residual_stream_is_a_layer_type_of_its_own() -> None:
    name = TensorName(3, "residual", "forward", "post", "resid_mid", "bf16")
    assert (
        name.file("20250908_095220", 7)
        == "bf16/20250908_095220_0007_residual_L3_forward_post_residual_bf16_resid_mid.pt"
    )


@pytest.mark.parametrize(
    ("fmt", "short"),
    [
        ("mxfp8_e4m3", "mxfp8"),
        ("mxfp4_e2m1", "mxfp4"),
        ("hifp8", "hifp8"),
        ("bf16", "bf16"),
        ("mxfp8_e5m2", "mxfp8-e5m2"),
    ],
)
def test_short_names_have_no_underscore(fmt: str, short: str) -> None:
    assert short_name(get_format(fmt)) == short


def nothing(spec: QuantSpec) -> dict[str, object]:
    return {}


def test_the_metadata_lists_every_slot(tiny: Callable[..., Experiment]) -> None:
    experiment = tiny("quant=FA_linear_mxfp8")
    declared = precision_map(experiment.model, experiment.quant)
    linear = formats_record(declared[ModuleId(0, "fc2")], nothing)
    assert linear["wgrad.g"] == {
        "format": "mxfp8_e4m3",
        "axis": "tokens",
        "block": 32,
        "scale_rule": "rceil",
        "rounding": "even",
        "scaling": None,
        "saturate": None,
        "amax_target": None,
        "reuse": False,
    }
    attention = formats_record(declared[ModuleId(0, "attention")], nothing)
    assert len(linear) == 6
    assert len(attention) == 12
    assert attention["qk.dgrad_q.k"]["reuse"]
    assert attention["qk.dgrad_q.k"]["axis"] == "head_dim"
    assert quant_type(declared[ModuleId(0, "attention")]) == "mxfp8"


def test_the_metadata_says_what_a_slots_values_depended_on(
    tiny: Callable[..., Experiment],
) -> None:
    experiment = tiny("quant=more/linear_mxfp4_sr_rht")
    declared = precision_map(experiment.model, experiment.quant)
    state = StepState(seed=7, iteration=2, micro_batch=3)
    record = formats_record(declared[ModuleId(1, "fc1")], state.record)
    g, x = record["wgrad.g"], record["wgrad.x"]
    assert (g["hadamard"], g["hadamard_block"], g["pre_scale"]) == ("random", 64, True)
    assert g["seed"] == seed_of(7, "layer 1 fc1 linear.wgrad.g") != x["seed"]
    assert g["offset"] == x["offset"] == 2 * 2**32 + 3
    assert g["signs"] == x["signs"]
    assert sorted(set(g["signs"])) == [-1, 1]  # type: ignore[call-overload]
    assert "seed" not in record["fprop.x"]
