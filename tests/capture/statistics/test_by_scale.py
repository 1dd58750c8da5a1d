"""Counting by block scale gives what quantising every element does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantexp.capture.statistics import by_scale, native
from quantexp.capture.statistics.fidelity import chosen_for
from quantexp.capture.statistics.summary import statistics
from quantexp.formats import encode, quantise


def wild(dtype: torch.dtype) -> torch.Tensor:
    """Blocks of very different scales, zeros, denormals, NaN and Inf; every magnitude of the dtype but for the sign."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 1, 512, generator=generator)
    x *= torch.exp2(torch.randn(64, 1, 512, generator=generator) * 8)
    x[32:] = torch.randn(32, 1, 512, generator=generator)
    x[7] = 0.0
    x[9, 0, :64] *= 1e-36
    x = x.to(dtype)
    bits = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    return torch.cat([x, bits.reshape(64, 1, 512)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4"])
@pytest.mark.parametrize("tensor", ["input", "value"])
def test_pairs_of_scale_and_magnitude_are_those_of_quantising_each_element(
    dtype: torch.dtype, name: str, tensor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_scale, "LEAST_ELEMENTS", dict.fromkeys(by_scale.LEAST_ELEMENTS, 0))
    monkeypatch.setattr(by_scale, "_CHUNK", 10_000)
    x, chosen = wild(dtype), chosen_for(name, tensor)
    operand, axis = chosen.spec, chosen.axis
    assert by_scale.can_be_counted(x, operand, axis)
    found = by_scale.by_scale(x, operand, axis)
    _, scales = encode(x, name, axis=axis, scale_rule=operand.scale_rule)
    q = quantise(x, name, axis=axis, scale_rule=operand.scale_rule).double()
    assert isinstance(scales, torch.Tensor)
    assert found.blocks_S.tolist() == np.bincount(scales.flatten(), minlength=256).tolist()
    kept = ~q.isnan()
    assert int(found.num_left_out) == int((x[~kept] != 0).sum())
    assert int(found.counts_U.sum()) == int(kept.sum())
    v = x.double()[kept]
    counts = found.counts_U.double()
    magnitude, held = found.magnitude_U.double(), found.held_U.double()
    for of_pairs, of_elements in (
        (magnitude**2, v**2),
        ((magnitude - held) ** 2, (v - q[kept]) ** 2),
        (held**2, q[kept] ** 2),
    ):
        # What lies 40 binades below its block's largest counts as zero: 2^-80 of the sum, below float64's rounding.
        assert float(counts @ of_pairs) == pytest.approx(float(of_elements.sum()), rel=1e-12)
    assert int(counts @ (held != 0).double()) == int((q[kept] != 0).sum())


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_statistics_of_a_large_tensor_agree_with_those_of_its_elements(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "kernels", lambda: None)
    x, chosen = wild(torch.bfloat16).repeat(2, 1, 2), chosen_for(name, "input")
    counted = statistics(x, chosen)
    monkeypatch.setattr(by_scale, "LEAST_ELEMENTS", {torch.bfloat16: 1 << 30})
    looked_at = statistics(x, chosen)
    for key in ("underflow_share", "saturated_share", "scale_exponents", "nan_blocks"):
        assert counted["fidelity"][key] == looked_at["fidelity"][key]
    assert {**counted, "fidelity": None} == {**looked_at, "fidelity": None}


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(1 << 10).bfloat16(),
        torch.zeros(1 << 20),
        torch.zeros(4096, 65).bfloat16(),
    ],
    ids=["small", "float32", "short last block"],
)
def test_other_tensors_are_left_to_their_elements(x: torch.Tensor) -> None:
    chosen = chosen_for("mxfp8", "input")
    assert not by_scale.can_be_counted(x, chosen.spec, chosen.axis)
    assert not by_scale.can_be_counted(
        torch.zeros(1 << 20).bfloat16(), chosen_for("hifp8", "input").spec, -1
    )
