"""Attention in tiles: the plain path's result and gradients, from no more than a tile of T x T.

In 16 bits o and dq are equal to the bit. dk and dv are float32 sums of T products in another order, which differ by up
to T 2^-24 of their terms, here 2^-16, before they are rounded to spacings of 2^-8 (bfloat16) or 2^-11 (float16) of the
result: few elements round the other way. If one in 2^8, or in float16 one in 2^2, does, the difference in the root mean
square is 2^-12. In float32 every product may be summed in another order: as in `test_fused`, 1e-5.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quantexp.compose import compose
from quantexp.quant import tiled, tiles
from quantexp.quant.attention import context, scores
from quantexp.quant.fused import nobody_asks
from quantexp.quant.moment import Moment, during
from quantexp.quant.precision import ModuleId, ModulePrecision, precision_map
from quantexp.quant.tap import nobody, operands_to

FULL_MXFP8 = (
    "quant=more/FA_full_mxfp8",
    "quant/pv=mxfp8",
    "quant.pv.dgrad_p.dO.format=mxfp8",
    "quant.pv.dgrad_p.v.format=mxfp8",
    "quant.pv.dgrad_v.P.format=mxfp8",
    "quant.pv.dgrad_v.dO.format=mxfp8",
)
FULL_HIFP8 = tuple(word.replace("mxfp8", "hifp8") for word in FULL_MXFP8)
SCHEMES = {
    "bf16": ("quant=bf16",),
    "mxfp8": FULL_MXFP8,
    "hifp8": FULL_HIFP8,
    "mxfp4, P again": ("quant=more/FA_full_mxfp4", "quant/pv=mxfp4"),
    "mxfp6, P again": ("quant=more/FA_full_mxfp6", "quant/pv=mxfp6"),
    "nvfp4, P again": ("quant=more/FA_full_nvfp4", "quant/pv=nvfp4"),
    "fp8, P again": ("quant=more/FA_full_fp8", "quant/pv=fp8"),
    "exact hifp8 of dS and P alone": (
        "quant=bf16",
        "quant.pv.dgrad_v.P={format: hifp8, scaling: exact}",
        "quant.qk.dgrad_k.dS={format: hifp8, scaling: exact}",
    ),
    "floor, clipped": (
        *FULL_MXFP8,
        "quant.pv.scale_rule=floor",
        "quant.pv.fprop.P.clip_gradient=true",
        "quant.pv.fprop.v.clip_gradient=true",
    ),
    "nvfp4, clipped": (
        "quant=bf16",
        "quant.pv.fprop.P={format: nvfp4, clip_gradient: true}",
    ),
    "3/4 of mxfp4": (
        "quant=bf16",
        "quant.qk.dgrad_q.dS={format: mxfp4, pre_scale: true}",
        "quant.qk.dgrad_k.dS={format: mxfp4, pre_scale: true}",
        "quant.pv.dgrad_v.P={format: mxfp4, pre_scale: true}",
    ),
    "Hadamard": (
        "quant=bf16",
        "quant.pv.fprop.P={format: hifp8, hadamard: deterministic, hadamard_block: 16}",
        "quant.pv.fprop.v={format: mxfp8, hadamard: deterministic, hadamard_block: 16}",
        "quant.qk.dgrad_k.dS={format: mxfp4, hadamard: random, hadamard_block: 64}",
        "quant.qk.dgrad_k.q={format: mxfp4, hadamard: random, hadamard_block: 64}",
        "quant.qk.dgrad_q.dS={format: hifp8, hadamard: random, hadamard_block: 8}",
        "quant.qk.dgrad_q.k={format: hifp8, hadamard: random, hadamard_block: 8}",
    ),
    "stochastic": (
        "quant=bf16",
        "quant.pv.fprop.P={format: hifp8, rounding: stochastic}",
        "quant.pv.dgrad_v.P={format: mxfp4, rounding: stochastic}",
        "quant.qk.dgrad_q.dS={format: nvfp4, rounding: stochastic}",
        "quant.qk.dgrad_k.dS={format: mxfp8, rounding: stochastic}",
    ),
    "stochastic, used again": (
        "quant=bf16",
        "quant.pv.fprop.P={format: mxfp4, rounding: stochastic}",
        "quant.pv.dgrad_v.P.format=reuse",
    ),
    "blocks of 64": (*FULL_MXFP8, "quant.qk.block=64", "quant.pv.block=64"),
}
Result = tuple[Tensor, Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def _moment() -> Iterator[None]:
    with during(Moment(1)) as moment:
        moment.begin(1, 0)
        yield


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 32 queries, so that short sequences have several."""
    monkeypatch.setattr(tiles, "ROWS", 32)


@cache
def declared(*words: str) -> ModulePrecision:
    experiment = compose(["training=fast", *words], None, {})
    return precision_map(experiment.model, experiment.quant)[ModuleId(0, "attention")]


def operands(dtype: torch.dtype, T: int, *, E: int = 32) -> list[Tensor]:
    """B 2, H 6, G 2, D 32."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(T, 2, 6, 32), (T, 2, 2, 32), (T, 2, 2, E)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def documents(T: int) -> Tensor:
    """Causal, and nothing before token 17 is seen from there on; [1, 1, T, T], True where it is not seen."""
    t = torch.arange(T)
    return ((t[None] > t[:, None]) | ((t[:, None] >= 17) & (t[None] < 17)))[None, None]


def softmax(S: Tensor, mask: Tensor | None, start: int = 0) -> Tensor:
    """Megatron's: masked with -10000, float32 within."""
    R, K = S.shape[2:]
    if mask is None:
        hidden = torch.arange(K) > torch.arange(start, start + R)[:, None]
    else:
        hidden = mask[:, :, start : start + R, :K]
    return torch.softmax(S.float().masked_fill(hidden, -10000.0), dim=-1).to(S.dtype)


class Looks:
    """Keeps what a tap is handed, and what a tap for operands is."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, ...], Tensor] = {}

    def __call__(self, operation: str, phase: str, name: str, tensor: Tensor, /) -> None:
        self.seen[operation, phase, name] = tensor

    def asks(self, operation: str, name: str) -> bool:
        return True

    def operand(
        self, precision: Any, site: Any, product: Any, name: str, x: Any, held: Any, layout: Any, /
    ) -> None:
        self.seen[site.value, product.value, name, "before"] = layout(x)
        self.seen[site.value, product.value, name] = layout(held)


def plain(
    precision: ModulePrecision, given: list[Tensor], mask: Tensor | None = None, tap: Any = nobody
) -> Result:
    return ended(plain_output(precision, *(leaves := fresh(given)), mask, tap), *leaves)


def plain_output(
    precision: ModulePrecision, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, tap: Any = nobody
) -> Tensor:
    T, B, H, _ = q.shape
    S = scores(precision, tap, q, k, 0.2).view(B, H, T, T)
    P = softmax(S, mask)
    tap("forward", "post", "attn_weights", P)
    return context(precision, tap, P.reshape(B * H, T, T), v)


def by_tiles(
    precision: ModulePrecision, given: list[Tensor], mask: Tensor | None = None, tap: Any = nobody
) -> Result:
    return ended(tiled_output(precision, *(leaves := fresh(given)), mask, tap), *leaves)


def tiled_output(
    precision: ModulePrecision, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, tap: Any = nobody
) -> Tensor:
    return tiled.attention(
        precision,
        tap,
        getattr(tap, "asks", nobody_asks),
        q,
        k,
        v,
        0.2,
        lambda S, start: softmax(S, mask, start),
        is_causal=mask is None,
    )


def fresh(given: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in given)
    return q, k, v


def ended(o: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Result:
    generator = torch.Generator().manual_seed(4)
    o.backward(torch.randn(o.shape, generator=generator).to(o.dtype))
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return o.detach(), q.grad, k.grad, v.grad


def far(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm())


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
    precision, given = declared(*words), operands(dtype, 137)
    agree(by_tiles(precision, given), plain(precision, given))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("T", [1, 31, 33, 64, 96, 100])
def test_any_length_will_do(T: int) -> None:
    precision, given = declared(*FULL_HIFP8), operands(torch.bfloat16, T)
    agree(by_tiles(precision, given), plain(precision, given))


@pytest.mark.usefixtures("small")
def test_documents_are_masked_and_value_heads_may_be_narrower() -> None:
    precision, given = declared(*FULL_MXFP8), operands(torch.bfloat16, 100, E=20)
    mask = documents(100)
    found = by_tiles(precision, given, mask)
    agree(found, plain(precision, given, mask))
    assert not torch.equal(found[0], by_tiles(precision, given)[0])


@pytest.mark.usefixtures("small")
def test_float32_differs_by_the_order_of_sums() -> None:
    precision, given = declared("quant=bf16"), operands(torch.float32, 137)
    for one, other in zip(by_tiles(precision, given), plain(precision, given), strict=True):
        assert far(one, other) < 1e-5


@pytest.mark.usefixtures("small")
def test_scale_of_a_tensor_is_that_of_all_tiles() -> None:
    """Of the queries before, what the largest elements of the last tile leave is another grid than their own."""
    precision, given = declared(*FULL_HIFP8), operands(torch.bfloat16, 96)
    alone = by_tiles(precision, [x[:64] for x in given])
    given[0][64:] *= 8
    found = by_tiles(precision, given)
    agree(found, plain(precision, given))
    assert not torch.equal(found[1][:64], alone[1])


@pytest.mark.usefixtures("small")
def test_second_backward_takes_its_own_scales() -> None:
    precision, given = declared(*FULL_HIFP8), operands(torch.bfloat16, 64)
    found = []
    for output in (tiled_output, plain_output):
        q, k, v = fresh(given)
        o = output(precision, q, k, v)
        dO = torch.randn(o.shape, generator=torch.Generator().manual_seed(4)).to(o.dtype)
        torch.autograd.grad(o, (q, k, v), dO * 64, retain_graph=True)
        found.append((o.detach(), *torch.autograd.grad(o, (q, k, v), dO)))
    agree(*found)


@pytest.mark.usefixtures("small")
def test_delayed_scaling_keeps_the_same_history() -> None:
    precision = declared(*FULL_HIFP8, "quant.pv.scaling=delayed", "quant.qk.scaling=delayed")
    found: list[tuple[list[Result], dict[str, Any]]] = []
    for way in (by_tiles, plain):
        with during(Moment(1)) as moment:
            results = []
            for iteration, size in ((1, 1.0), (2, 3.0), (3, 0.5)):
                moment.begin(iteration, 0)
                given = [x * size for x in operands(torch.bfloat16, 100)]
                results.append(way(precision, given))
                moment.finish()
            found.append((results, moment.state_dict()))
    (ours, our_history), (theirs, their_history) = found
    assert our_history == their_history
    assert len([stream for stream in our_history if stream.endswith((".P", ".dS"))]) == 4
    for one, other in zip(ours, theirs, strict=True):
        agree(one, other)


class Largest(TorchDispatchMode):  # type: ignore[misc]
    """The most elements that any tensor has that is made inside."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = result if isinstance(result, list | tuple) else [result]
        for x in found:
            if isinstance(x, Tensor):
                self.num_elements = max(self.num_elements, x.numel())
        return result


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "words", [SCHEMES["bf16"], FULL_MXFP8, FULL_HIFP8], ids=["bf16", "mxfp8", "hifp8"]
)
def test_nothing_larger_than_a_tile_is_made(words: tuple[str, ...]) -> None:
    """A tap for operands is there and wants nothing."""
    T, N = 192, 12
    precision, given = declared(*words), operands(torch.bfloat16, T)
    with operands_to(Looks().operand, lambda *slot: False), Largest() as largest:
        by_tiles(precision, given)
    assert largest.num_elements == N * tiles.ROWS * T
    with Largest() as whole:
        plain(precision, given)
    assert whole.num_elements == N * T * T


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("words", [SCHEMES["bf16"], FULL_MXFP8, FULL_HIFP8])
def test_what_is_asked_for_is_put_together(words: tuple[str, ...]) -> None:
    precision, given = declared(*words), operands(torch.bfloat16, 100)
    ours, theirs = Looks(), Looks()
    with operands_to(ours.operand):
        by_tiles(precision, given, None, ours)
    with operands_to(theirs.operand):
        plain(precision, given, None, theirs)
    assert ours.seen.keys() == theirs.seen.keys()
    assert {
        ("forward", "post", "attn_weights"),
        ("backward", "pre", "grad_scores"),
        ("backward", "post", "grad_attn_weights"),
        ("backward", "pre", "grad_output"),
        ("pv", "fprop", "P"),
        ("pv", "dgrad_v", "P"),
        ("qk", "dgrad_k", "dS", "before"),
    } <= ours.seen.keys()
    for key, tensor in ours.seen.items():
        if key[-1] in ("grad_key", "grad_value"):
            assert far(tensor, theirs.seen[key]) < 2**-12, key
        else:
            assert torch.equal(tensor, theirs.seen[key]), key


@pytest.mark.usefixtures("small")
def test_gradients_are_handed_over_whoever_asks() -> None:
    looks = Looks()
    by_tiles(declared(*FULL_MXFP8), operands(torch.bfloat16, 64), None, lambda *seen: looks(*seen))
    assert {name for _, _, name in looks.seen} == {
        "grad_output",
        "grad_query",
        "grad_key",
        "grad_value",
    }


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_is_let_pass(name: str) -> None:
    compose(["training=fast", "training.attention=tiled", *SCHEMES[name]], None, {})


def test_what_is_whole_is_rounded_stochastically_as_a_whole() -> None:
    words = ["quant=bf16", "quant.pv.dgrad_v.dO={format: mxfp4, rounding: stochastic}"]
    compose(["training=fast", "training.attention=tiled", *words], None, {})
    precision, given = declared(*words), operands(torch.bfloat16, 64)
    agree(by_tiles(precision, given), plain(precision, given))
