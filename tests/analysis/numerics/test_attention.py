from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from quantexp.analysis.numerics.attention import (
    layers_of,
    maps_of,
    masked,
    pooled,
    pooled_by_size,
    probabilities,
)
from quantexp.capture.reader import open_capture
from quantexp.errors import CaptureError
from tests.analysis.captures import Capture

from .desks import normal

T, B, H, G, D = 24, 2, 4, 2, 16


def add_attention(capture: Capture, **more: object) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = normal(T, B, H, D, seed=1), normal(T, B, G, D, seed=2)
    for name, x in (("query", q), ("key", k)):
        line = capture.add(x, name, "attention", 3)
        line |= more
    capture.write()
    return q, k


@pytest.mark.parametrize("scale", [None, 0.5])
def test_recomputed_probabilities_are_those_of_torchs_attention(
    capture: Capture, scale: float | None
) -> None:
    q, k = add_attention(capture, softmax_scale=scale)
    (layer,) = layers_of(open_capture(capture.dir))
    maps = maps_of(layer, sequence=1)
    # Attention to one-hot values gives the probabilities: V is the identity of the keys.
    one_hot = torch.eye(T).expand(1, H, T, T)
    q_BHTD, k_BGTD = (x[:, 1:2].float().permute(1, 2, 0, 3) for x in (q, k))
    expected = scaled_dot_product_attention(
        q_BHTD, k_BGTD.repeat_interleave(H // G, 1), one_hot, is_causal=True, scale=scale
    )[0]
    # 1e-6: float32 sums of 16 products and a softmax, in another order.
    torch.testing.assert_close(maps.probabilities, expected, rtol=1e-5, atol=1e-6)
    assert maps.recomputed
    assert (maps.num_queries, maps.num_keys, maps.heads) == (T, T, tuple(range(H)))
    assert maps.gradient is None


def test_captured_probabilities_are_read_with_their_gradient(capture: Capture) -> None:
    add_attention(capture)
    p, dp = torch.rand(B, H, T, T), torch.randn(B, H, T, T)
    capture.add(p, "attn_weights", "attention", 3)
    capture.add(dp, "grad_attn_weights", "attention", 3)
    (layer,) = layers_of(open_capture(capture.dir))
    maps = maps_of(layer)
    assert not maps.recomputed
    assert torch.equal(maps.probabilities, p[0])
    assert maps.gradient is not None
    assert torch.equal(maps.gradient, dp[0])


def test_fewer_queries_than_keys_are_the_last_ones() -> None:
    p = probabilities(torch.randn(3, 8), torch.randn(5, 8), 1.0)
    assert (p == 0).tolist() == [
        [False, False, False, True, True],
        [False, False, False, False, True],
        [False] * 5,
    ]
    # 1e-6: five float32 numbers that add up to one.
    torch.testing.assert_close(p.sum(1), torch.ones(3), rtol=0, atol=1e-6)


def test_large_maps_keep_the_largest_probability_of_each_cell_and_the_mean_gradient() -> None:
    x = torch.zeros(1, 8, 8)
    x[0, 5, 2] = 0.9
    x[0, 0, 7] = -0.4
    small = pooled(x, 4)
    assert small.shape == (1, 4, 4)
    assert float(small[0, 2, 1]) == pytest.approx(0.9)
    assert float(pooled_by_size(x, 4)[0, 0, 3]) == pytest.approx(-0.1)
    assert pooled(x, 8) is x
    assert pooled_by_size(x, 8) is x


@pytest.mark.parametrize("starts", [None, [0, 3, 4, 7]])
@pytest.mark.parametrize(
    ("side", "queries", "keys"), [(8, 8, 8), (4, 8, 8), (5, 12, 12), (4, 6, 9)]
)
def test_a_cell_is_behind_the_mask_only_if_all_of_its_tokens_are(
    side: int, queries: int, keys: int, starts: list[int] | None
) -> None:
    def sees(query: int, key: int) -> bool:
        return key <= query + keys - queries and (starts is None or key >= start(query))

    def start(query: int) -> int:
        assert starts is not None
        return max(first for first in starts if first <= query + keys - queries)

    def tokens(cell: int, extent: int) -> range:
        cells = min(side, extent)
        return range(cell * extent // cells, -(-(cell + 1) * extent // cells))

    mask = masked(queries, keys, starts, side)
    for row, column in itertools.product(range(min(side, queries)), range(min(side, keys))):
        all_ = itertools.product(tokens(row, queries), tokens(column, keys))
        assert mask[row, column] == (not any(sees(*pair) for pair in all_))


def test_documents_do_not_see_each_other(capture: Capture) -> None:
    """Each document's P is that of its own tokens alone, by torch."""
    q, k = add_attention(capture)
    capture.lines[0]["document_starts"] = [[0, 5, 6, 20], [0]]
    capture.write()
    (layer,) = layers_of(open_capture(capture.dir))
    maps = maps_of(layer)
    assert maps.starts == [0, 5, 6, 20]
    for begin, end in ((0, 5), (5, 6), (6, 20), (20, T)):
        rows = maps.probabilities[:, begin:end]
        assert (rows[..., :begin] == 0).all()
        assert (rows[..., end:] == 0).all()
        for head in range(H):
            own = q[begin:end, 0, head].float(), k[begin:end, 0, head // (H // G)].float()
            identity = torch.eye(end - begin)
            expected = scaled_dot_product_attention(*own, identity, is_causal=True)
            # Sums of at most 16 products, rounded in another order: 2^-20.
            assert torch.allclose(rows[head, :, begin:end], expected, atol=2.0**-20)
    assert maps_of(layer, sequence=1).starts == [0]


def test_sampled_heads_keep_their_numbers(capture: Capture) -> None:
    line = capture.add(torch.rand(B, 2, T, T), "attn_weights", "attention", 0)
    line["sample"] = {"of": "heads", "axis": 1, "indices": [1, 3], "shape": [B, H, T, T]}
    capture.write()
    (layer,) = layers_of(open_capture(capture.dir))
    assert maps_of(layer).heads == (1, 3)


def test_a_sample_of_tokens_is_not_recomputed(capture: Capture) -> None:
    sample = {"of": "rows", "axis": 0, "indices": list(range(T)), "shape": [2 * T, B, H, D]}
    add_attention(capture, sample=sample)
    (layer,) = layers_of(open_capture(capture.dir))
    with pytest.raises(CaptureError, match="a sample, of which no attention can be recomputed"):
        maps_of(layer)


@pytest.mark.parametrize("shape", [(T, B, 3, D), (T, B, G, D // 2), (T, G * D)])
def test_shapes_that_do_not_fit_are_refused(capture: Capture, shape: tuple[int, ...]) -> None:
    capture.add(normal(T, B, H, D), "query", "attention", 0)
    capture.add(normal(*shape), "key", "attention", 0)
    (layer,) = layers_of(open_capture(capture.dir))
    with pytest.raises(CaptureError, match=r"query and key must be \[tokens, sequences, heads"):
        maps_of(layer)


def test_probabilities_of_another_layout_are_refused(capture: Capture) -> None:
    capture.add(torch.rand(T, T), "attn_weights", "attention", 0)
    (layer,) = layers_of(open_capture(capture.dir))
    with pytest.raises(CaptureError, match=r"must be \[sequences, heads, queries, keys\], got"):
        maps_of(layer)


def test_a_layer_without_query_cannot_be_drawn(capture: Capture) -> None:
    capture.add(normal(T, B, G, D), "key", "attention", 0)
    (layer,) = layers_of(open_capture(capture.dir))
    assert not layer.can_be_drawn
