from __future__ import annotations

import pytest
import torch

from quantexp.analysis.tensors.saturation import largest_representable
from quantexp.formats import get_format, resolve

MX4 = get_format("mxfp4")


@pytest.mark.parametrize("rule", ["rceil", "ceil"])
def test_rules_that_round_scales_up_have_no_limit(rule: str) -> None:
    assert largest_representable(torch.randn(4, 32), resolve("mxfp4", scale_rule=rule), -1) is None


def test_each_block_has_the_limit_of_its_scale() -> None:
    x = torch.ones(1, 64)
    x[0, 32:] = 4.0
    limit = largest_representable(x, MX4, -1)
    assert limit is not None
    assert limit.shape == x.shape
    assert limit[0, 31:33].tolist() == [6.0 / 4, 6.0]


def test_a_short_last_block_has_its_own_limit() -> None:
    x = torch.ones(40, 3)
    x[32:] = 2.0**-6
    limit = largest_representable(x, MX4, 0)
    assert limit is not None
    assert limit.shape == x.shape
    assert limit[:, 0].unique().tolist() == [6 * 2.0**-8, 1.5]


def test_another_block_size_is_respected() -> None:
    limit = largest_representable(torch.tensor([1.0, 1.0, 8.0, 8.0]), resolve("mxfp4", block=2), 0)
    assert limit is not None
    assert limit.tolist() == [1.5, 1.5, 12.0, 12.0]


def test_hifp8_without_scale_ends_at_32768() -> None:
    limit = largest_representable(torch.ones(3), get_format("hifp8"), -1)
    assert limit is not None
    assert float(limit) == 32768


def test_hifp8s_limit_moves_with_its_scale() -> None:
    spec = resolve("hifp8", scaling="current", saturate=False)
    limit = largest_representable(torch.tensor([60.0]), spec, -1)
    assert limit is not None
    assert float(limit) == 4 * 32768  # 60 is brought to 15


def test_nvfp4s_blocks_have_limits_of_their_own_scale() -> None:
    x = torch.ones(20, 2)
    x[16:] = 0.5
    limit = largest_representable(x, resolve("nvfp4", scaling="none"), 0)
    assert limit is not None
    assert limit.shape == x.shape
    # 1 / 6 and 0.5 / 6 to E4M3: 11 / 64 and 11 / 128
    assert limit[:, 1].unique().tolist() == [6 * 11 / 128, 6 * 11 / 64]
    scalar = largest_representable(torch.tensor(3.0), resolve("nvfp4", scaling="none"), 0)
    assert scalar == 3.0


@pytest.mark.parametrize(("name", "largest"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
def test_fp8s_limit_is_amax_unless_told_otherwise(name: str, largest: float) -> None:
    fmt = get_format(name)
    x = torch.tensor([0.5, -7.0])
    assert largest_representable(x, fmt, -1) == 7.0
    assert largest_representable(x, resolve(fmt, scaling="none"), -1) == largest
    assert largest_representable(x, fmt, -1, torch.tensor(14.0)) == 14.0


def test_bf16_ends_at_its_largest_value() -> None:
    limit = largest_representable(torch.ones(1), get_format("bf16"), -1)
    assert limit is not None
    assert float(limit) == torch.finfo(torch.bfloat16).max


def test_nothing_has_no_limit() -> None:
    assert largest_representable(torch.zeros(0, 4), MX4, -1) is None
