"""Attention in tiles: the plain path's result and gradients, with at most one tile of T x T in memory.

In 16 bits o and dq are bit-identical. dk and dv are float32 sums of T products in another order, which differ by up
to T 2^-24 of their terms, here 2^-16, before they are rounded to spacings of 2^-8 (bfloat16) or 2^-11 (float16) of the
result: few elements are rounded the other way. If one in 2^8 is, or in float16 one in 2^2, the root mean square of the
difference is 2^-12. In float32 every product may be summed in another order: as in `test_fused`, 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quantexp.config.compose import compose
from quantexp.formats import Place
from quantexp.quant import multiply, whole_amax
from quantexp.quant.attention import tile_products, tiles
from quantexp.quant.attention.call import AttentionCall
from quantexp.quant.attention.plain import context, scores
from quantexp.quant.hooks import hook_operands, no_hook
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.step_state import Piece, StepState, use_step_state

from .kernels.tiled_cases import (
    FULL_HIFP8,
    FULL_MXFP8,
    SCHEMES,
    Result,
    by_tiles,
    declared,
    documents,
    far,
    fresh,
    operands,
    softmax,
    tiled_output,
    with_gradients,
)


@pytest.fixture(autouse=True)
def _moment() -> Iterator[None]:
    with use_step_state(StepState(1)) as state:
        state.begin(1, 0)
        yield


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 32 queries, so that short sequences have several."""
    monkeypatch.setattr(tiles, "ROWS", 32)


class Looks:
    """Stores the tensors and operands that hooks receive."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[str, ...], Tensor] = {}

    def __call__(self, operation: str, phase: str, name: str, tensor: Tensor, /) -> None:
        self.tensors[operation, phase, name] = tensor

    def asks(self, operation: str, name: str) -> bool:
        return True

    def operand(
        self,
        precision: Any,
        slot: Any,
        x: Any,
        quantised: Any,
        layout: Any,
        /,
    ) -> None:
        key = slot.site.value, slot.product.value, str(slot.operand)
        self.tensors[*key, "before"] = layout(x)
        self.tensors[key] = layout(quantised)


def plain(
    precision: ModulePrecision, qkv: list[Tensor], mask: Tensor | None = None, hook: Any = no_hook
) -> Result:
    return with_gradients(plain_output(precision, *(leaves := fresh(qkv)), mask, hook), *leaves)


def plain_output(
    precision: ModulePrecision,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
    hook: Any = no_hook,
) -> Tensor:
    T, B, H, _ = q.shape
    call = AttentionCall(precision, 0.2, hook)
    S = scores(call, q, k).view(B, H, T, T)
    P = softmax(S, mask)
    hook("forward", "post", "attn_weights", P)
    return context(call, P.reshape(B * H, T, T), v)


def agree(ours: Result, theirs: Result) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
    (o, dq, dk, dv), (o_, dq_, dk_, dv_) = ours, theirs
    assert torch.equal(o, o_)
    assert torch.equal(dq, dq_)
    for one, other in ((dk, dk_), (dv, dv_)):
        assert (one.double() - other.double()).norm() <= 2**-12 * other.double().norm()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("words", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_agrees_with_the_plain_path(words: tuple[str, ...], dtype: torch.dtype) -> None:
    """137 tokens: neither a multiple of a tile nor of a block."""
    precision, qkv = declared(*words), operands(dtype, 137)
    agree(by_tiles(precision, qkv), plain(precision, qkv))


def two_ranges(stream: str, shape: tuple[int, ...]) -> list[Piece]:
    """P and dS as of the second of three ranks, which has the second and the fifth of six ranges of the queries.

    Blocks of 32 queries end where the first range does.
    """
    N, T, K = shape
    whole = N, 3 * T, K
    halves = (slice(0, T // 2), T // 2), (slice(T // 2, T), 2 * T)
    return [((slice(N), rows, slice(K)), Place(whole, (0, at, 0))) for rows, at in halves]


def test_tiles_of_a_ranks_queries_draw_the_numbers_of_its_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 192 queries in tiles of 64, so that the ranges meet within the second tile."""
    monkeypatch.setattr(tiles, "ROWS", 64)
    precision, qkv = declared(*SCHEMES["stochastic"]), operands(torch.bfloat16, 192)
    same = whole_amax.use_reduction(lambda module, amax: amax)
    with use_step_state(StepState(1, pieces_of=two_ranges)), same:
        ours, theirs = by_tiles(precision, qkv), plain(precision, qkv)
    agree(ours, theirs)
    assert not torch.equal(ours[0], by_tiles(precision, qkv)[0]), "other numbers than of the whole"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("T", [1, 31, 33, 64, 96, 100])
def test_any_length_is_supported(T: int) -> None:
    precision, qkv = declared(*FULL_HIFP8), operands(torch.bfloat16, T)
    agree(by_tiles(precision, qkv), plain(precision, qkv))


@pytest.mark.usefixtures("small")
def test_documents_are_masked_and_value_heads_may_be_narrower() -> None:
    precision, qkv = declared(*FULL_MXFP8), operands(torch.bfloat16, 100, E=20)
    mask = documents(100)
    ours = by_tiles(precision, qkv, mask)
    agree(ours, plain(precision, qkv, mask))
    assert not torch.equal(ours[0], by_tiles(precision, qkv)[0])


@pytest.mark.usefixtures("small")
def test_float32_differs_by_the_order_of_sums() -> None:
    precision, qkv = declared("quant=bf16"), operands(torch.float32, 137)
    for one, other in zip(by_tiles(precision, qkv), plain(precision, qkv), strict=True):
        assert far(one, other) < 1e-5


@pytest.mark.usefixtures("small")
def test_scale_of_a_tensor_is_that_of_all_tiles() -> None:
    """The largest elements of the last tile would give the earlier queries another grid than their own."""
    precision, qkv = declared(*FULL_HIFP8), operands(torch.bfloat16, 96)
    alone = by_tiles(precision, [x[:64] for x in qkv])
    qkv[0][64:] *= 8
    ours = by_tiles(precision, qkv)
    agree(ours, plain(precision, qkv))
    assert not torch.equal(ours[1][:64], alone[1])


@pytest.mark.usefixtures("small")
def test_second_backward_uses_its_own_scales() -> None:
    precision, qkv = declared(*FULL_HIFP8), operands(torch.bfloat16, 64)
    results = []
    for output in (tiled_output, plain_output):
        q, k, v = fresh(qkv)
        o = output(precision, q, k, v)
        dO = torch.randn(o.shape, generator=torch.Generator().manual_seed(4)).to(o.dtype)
        torch.autograd.grad(o, (q, k, v), dO * 64, retain_graph=True)
        results.append((o.detach(), *torch.autograd.grad(o, (q, k, v), dO)))
    agree(*results)  # type: ignore[arg-type]


@pytest.mark.usefixtures("small")
def test_delayed_scaling_keeps_the_same_history() -> None:
    precision = declared(*FULL_HIFP8, "quant.pv.scaling=delayed", "quant.qk.scaling=delayed")
    outcomes: list[tuple[list[Result], dict[str, Any]]] = []
    for way in (by_tiles, plain):
        with use_step_state(StepState(1)) as state:
            results = []
            for iteration, size in ((1, 1.0), (2, 3.0), (3, 0.5)):
                state.begin(iteration, 0)
                qkv = [x * size for x in operands(torch.bfloat16, 100)]
                results.append(way(precision, qkv))
                state.finish()
            outcomes.append((results, state.state_dict()))
    (ours, our_history), (theirs, their_history) = outcomes
    assert our_history == their_history
    assert len([stream for stream in our_history if stream.endswith((".P", ".dS"))]) == 4
    for one, other in zip(ours, theirs, strict=True):
        agree(one, other)


DS = ("quant.qk.dgrad_q.dS", "quant.qk.dgrad_k.dS")
#: Number of reads of a tile of dS for quantisation.
READS = {
    "mxfp8": (1, FULL_MXFP8),
    "mxfp4": (1, SCHEMES["mxfp4, P again"]),
    "hifp8": (1, FULL_HIFP8),
    "exact hifp8": (
        1,
        ("quant=bf16", *(f"{slot}={{format: hifp8, scaling: exact}}" for slot in DS)),
    ),
    "bf16": (0, SCHEMES["bf16"]),
    "one slot alone": (1, ("quant=bf16", f"{DS[0]}.format=mxfp8")),
    "the other alone": (1, ("quant=bf16", f"{DS[1]}.format=mxfp8")),
    "two formats": (2, ("quant=bf16", f"{DS[0]}.format=mxfp8", f"{DS[1]}.format=mxfp4")),
    "two scale rules": (2, (*FULL_MXFP8, f"{DS[1]}.scale_rule=floor")),
    "stochastic dS": (2, (*FULL_MXFP8, *(f"{slot}.rounding=stochastic" for slot in DS))),
    "delayed": (2, (*FULL_HIFP8, "quant.qk.scaling=delayed")),
    "Hadamard": (2, SCHEMES["Hadamard"]),
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", READS)
def test_tile_is_read_once_for_two_copies_that_differ_in_their_axis(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    tiles_of_dS: list[Tensor] = []
    quantised_tile_pair = tile_products.TileProducts.quantised_tile_pair

    def record_pair(
        self: Any, first: Any, second: Any, tile: Any, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        reads.append(0)
        tiles_of_dS.append(x)
        return quantised_tile_pair(self, first, second, tile, x)

    def counted(of: Callable[..., Any]) -> Callable[..., Any]:
        def count(x: Tensor, *rest: Any, **options: Any) -> Any:
            if tiles_of_dS and x is tiles_of_dS[-1]:
                reads[-1] += 1
            return of(x, *rest, **options)

        return count

    monkeypatch.setattr(tile_products.TileProducts, "quantised_tile_pair", record_pair)
    for module, each in (
        (multiply, "quantise"),
        (multiply, "quantise_both"),
        (multiply, "quantise_transformed"),
        (whole_amax, "hadamard"),
    ):
        monkeypatch.setattr(module, each, counted(getattr(module, each)))
    expected, words = READS[name]
    by_tiles(declared(*words), operands(torch.bfloat16, 100))
    assert len(reads) > 1
    assert set(reads) == {expected}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", sorted({*SCHEMES, *READS}))
def test_one_read_gives_the_bits_of_two(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """137 tokens: neither a multiple of a tile nor of a block."""
    words = READS[name][1] if name in READS else SCHEMES[name]
    precision, qkv = declared(*words), operands(torch.bfloat16, 137)
    ours = by_tiles(precision, qkv)
    monkeypatch.setattr(tile_products, "shares_read", lambda first, second: False)
    for one, other in zip(ours, by_tiles(precision, qkv), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("small")
def test_amax_of_two_copies_alike_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs: list[Tensor] = []

    def record_amax(x: Tensor, declared: Any, axis: int) -> Tensor:
        inputs.append(x)
        return whole_amax.own_amax(x, declared, axis)

    monkeypatch.setattr(tile_products, "own_amax", record_amax)
    for scaling, times in (("exact", 1), ("current", 2)):
        inputs.clear()
        words = [f"{DS[0]}={{format: hifp8, scaling: exact}}"]
        words += [f"{DS[1]}={{format: hifp8, scaling: {scaling}}}"]
        by_tiles(declared("quant=bf16", *words), operands(torch.bfloat16, 100))
        assert len(inputs) == 3 * times


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor created inside."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, list | tuple) else [result]
        for x in outputs:
            if isinstance(x, Tensor):
                self.num_elements = max(self.num_elements, x.numel())
        return result


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "words", [SCHEMES["bf16"], FULL_MXFP8, FULL_HIFP8], ids=["bf16", "mxfp8", "hifp8"]
)
def test_nothing_larger_than_a_tile_is_created(words: tuple[str, ...]) -> None:
    """An operand hook is registered and needs nothing."""
    T, N = 192, 12
    precision, qkv = declared(*words), operands(torch.bfloat16, T)
    with hook_operands(Looks().operand, lambda *slot: False), Largest() as largest:
        by_tiles(precision, qkv)
    assert largest.num_elements == N * tiles.ROWS * T
    with Largest() as whole:
        plain(precision, qkv)
    assert whole.num_elements == N * T * T


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("words", [SCHEMES["bf16"], FULL_MXFP8, FULL_HIFP8])
def test_requested_tensors_are_assembled_from_tiles(words: tuple[str, ...]) -> None:
    precision, qkv = declared(*words), operands(torch.bfloat16, 100)
    ours, theirs = Looks(), Looks()
    with hook_operands(ours.operand):
        by_tiles(precision, qkv, None, ours)
    with hook_operands(theirs.operand):
        plain(precision, qkv, None, theirs)
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert {
        ("forward", "post", "attn_weights"),
        ("backward", "pre", "grad_scores"),
        ("backward", "post", "grad_attn_weights"),
        ("backward", "pre", "grad_output"),
        ("pv", "fprop", "P"),
        ("pv", "dgrad_v", "P"),
        ("qk", "dgrad_k", "dS", "before"),
    } <= ours.tensors.keys()
    for key, tensor in ours.tensors.items():
        if key[-1] in ("grad_key", "grad_value"):
            assert far(tensor, theirs.tensors[key]) < 2**-12, key
        else:
            assert torch.equal(tensor, theirs.tensors[key]), key


@pytest.mark.usefixtures("small")
def test_gradients_are_passed_to_every_hook() -> None:
    looks = Looks()
    by_tiles(
        declared(*FULL_MXFP8),
        operands(torch.bfloat16, 64),
        None,
        lambda *arguments: looks(*arguments),
    )
    assert {name for _, _, name in looks.tensors} == {
        "grad_output",
        "grad_query",
        "grad_key",
        "grad_value",
    }


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_is_accepted(name: str) -> None:
    compose(["training=fast", "training.attention=tiled", *SCHEMES[name]], None, {})


def test_whole_tensors_are_rounded_stochastically_as_a_whole() -> None:
    words = ["quant=bf16", "quant.pv.dgrad_v.dO={format: mxfp4, rounding: stochastic}"]
    compose(["training=fast", "training.attention=tiled", *words], None, {})
    precision, qkv = declared(*words), operands(torch.bfloat16, 64)
    agree(by_tiles(precision, qkv), plain(precision, qkv))
