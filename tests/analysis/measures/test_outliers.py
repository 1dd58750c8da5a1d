from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from quantexp.analysis.measures.outliers import (
    channel_dims,
    head_dims,
    outliers,
    profile_ranks,
)


def test_one_loud_channel_has_its_ratio_and_its_share_of_the_energy() -> None:
    x = torch.ones(10, 2, 200)
    x[..., 37] = -16.0
    channels = outliers(x, (-1,))
    assert channels is not None
    assert (channels.num_groups, channels.largest, channels.amax_ratio) == (200, 37, 16.0)
    # The top 1 % are two channels: the loud one and one of the others.
    assert math.isclose(channels.top_energy_share, (256 + 1) / (256 + 199), rel_tol=1e-14)
    assert channels.profile == (16.0, *[1.0] * 8)


def test_equal_channels_have_ratio_one_and_their_share_of_the_energy() -> None:
    channels = outliers(torch.full((3, 50), 2.0), (-1,))
    assert channels is not None
    assert (channels.amax_ratio, channels.top_energy_share) == (1.0, 1 / 50)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dims", [(-1,), (-2, -1), (2,), (1,)])
def test_channels_and_heads_are_those_of_numpy(dims: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x = (torch.randn(40, 3, 8, 16, generator=generator) ** 3).to(dtype)
    n = x.double().numpy()
    others = tuple(d for d in range(4) if d not in {dim % 4 for dim in dims})
    amax, energy = np.abs(n).max(others).ravel(), (n**2).sum(others).ravel()
    groups = outliers(x, dims)
    assert groups is not None
    top = math.ceil(amax.size / 100)
    assert groups.num_groups == amax.size
    assert groups.largest == amax.argmax()
    # 1e-6: amax is exact, and squares are summed from float32.
    assert math.isclose(groups.amax_ratio, amax.max() / np.median(amax), rel_tol=1e-12)
    share = np.sort(energy)[::-1][:top].sum() / energy.sum()
    assert math.isclose(groups.top_energy_share, share, rel_tol=1e-6)


def test_chunks_of_a_large_tensor_are_one_tensor() -> None:
    x = torch.randn(1 << 16, 40, generator=torch.Generator().manual_seed(2))
    channels = outliers(x, (-1,))
    assert channels is not None
    amax = x.abs().amax(0).double()
    assert math.isclose(channels.amax_ratio, float(amax.max() / amax.quantile(0.5)), rel_tol=1e-12)


def test_nan_and_inf_count_as_nothing() -> None:
    x = torch.tensor([[1.0, math.nan, 2.0], [-3.0, math.inf, 1.0]])
    channels = outliers(x, (-1,))
    assert channels is not None
    assert (channels.amax_ratio, channels.largest) == (1.5, 0)


def test_zeros_have_no_ratio_and_a_single_channel_that_is_not_zero_an_infinite_one() -> None:
    x = torch.zeros(4, 8)
    channels = outliers(x, (-1,))
    assert channels is not None
    assert math.isnan(channels.amax_ratio)
    assert math.isnan(channels.top_energy_share)
    x[1, 3] = 1
    channels = outliers(x, (-1,))
    assert channels is not None
    assert (channels.amax_ratio, channels.largest, channels.top_energy_share) == (math.inf, 3, 1.0)


def test_an_empty_tensor_has_no_outliers() -> None:
    assert outliers(torch.zeros(0, 8), (-1,)) is None


def test_a_vector_is_a_matrix_of_one_row() -> None:
    channels = outliers(torch.tensor([1.0, 2.0, 6.0]), (-1,))
    assert channels is not None
    assert (channels.num_groups, channels.amax_ratio) == (3, 3.0)


@pytest.mark.parametrize(
    ("layer_type", "tensor", "ndim", "channels", "heads"),
    [
        ("linear", "input", 3, (-1,), None),
        ("linear", "weight", 2, (-1,), None),
        ("attention", "query", 4, (-2, -1), (2,)),
        ("attention", "grad_output", 4, (-2, -1), (2,)),
        ("attention", "output", 3, (-1,), None),
        ("attention", "attn_weights", 4, None, (1,)),
        ("residual", "resid_mid", 3, (-1,), None),
        ("linear", "input", 0, None, None),
    ],
)
def test_channels_and_heads_lie_where_the_captured_layouts_have_them(
    layer_type: str,
    tensor: str,
    ndim: int,
    channels: tuple[int, ...] | None,
    heads: tuple[int, ...] | None,
) -> None:
    assert channel_dims(layer_type, tensor, ndim) == channels
    assert head_dims(layer_type, tensor, ndim) == heads


def test_a_profile_ends_with_the_last_channel() -> None:
    assert profile_ranks(8) == [1, 2, 4, 8]
    assert profile_ranks(10) == [1, 2, 4, 8, 10]
    assert profile_ranks(1) == [1]
