"""The proof observes attention in tiles: the operands of every call, several of which form one product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.quant.attention import tile_products, tiles
from quantexp.quant.multiply import quantise_operand
from quantexp.quant.sites import FPROP_P, dim_of
from quantexp.quant.whole_amax import own_amax
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status
from tests.proof.test_fused import entries
from tests.recorded import failure

pytestmark = pytest.mark.slow

RunTiny = Callable[..., RunDir]
TILED = (
    "training.attention=tiled",
    "model.num_layers=1",
    "training.iterations=1",
    "training.warmup_iterations=0",
    "capture=off",
)
FULL_MXFP8 = (
    "quant=more/FA_full_mxfp8",
    "quant/pv=mxfp8",
    "quant.pv.dgrad_p.dO.format=mxfp8",
    "quant.pv.dgrad_v.P.format=mxfp8",
    "quant.pv.dgrad_v.dO.format=mxfp8",
)
FULL_HIFP8 = tuple(word.replace("mxfp8", "hifp8") for word in FULL_MXFP8)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them for the tiny experiment's 64 tokens."""
    monkeypatch.setattr(tiles, "ROWS", 32)


def completed(run: RunDir) -> RunDir:
    status = read_status(run.status)
    assert status is not None
    assert status.state is State.COMPLETED, status.reason
    return run


AT_RANDOM = tuple(
    f"quant.{slot}.rounding=stochastic"
    for slot in ("pv.fprop.P", "pv.dgrad_v.P", "qk.dgrad_q.dS", "qk.dgrad_k.dS")
)


@pytest.mark.parametrize(
    "words",
    [FULL_MXFP8, FULL_HIFP8, (*FULL_MXFP8, *AT_RANDOM)],
    ids=["mxfp8", "hifp8", "stochastic"],
)
def test_every_operand_of_every_tile_is_judged(run_tiny: RunTiny, words: tuple[str, ...]) -> None:
    by_slot = entries(completed(run_tiny(*words, *TILED)))
    assert len(by_slot) == 12
    for (_, slot), entry in by_slot.items():
        assert entry["status"] == "engaged", (slot, entry["reason"])
        assert entry["calls"] == entry["quantised_calls"] == 1, slot


def test_recomputed_products_are_counted_separately(run_tiny: RunTiny) -> None:
    """S recomputed in the backward pass; for scales of P and dS also S in both passes, and dP in the backward pass."""
    of_blocks, of_tensor = (entries(run_tiny(*words, *TILED)) for words in (FULL_MXFP8, FULL_HIFP8))
    assert len(of_blocks) == 12
    for (layer, slot), entry in of_blocks.items():
        is_score = slot.startswith("qk.fprop")
        assert entry["recomputed_calls"] == (1 if is_score else 0), slot
        again = {"qk.fprop": 3, "pv.dgrad_p": 1}.get(slot.rpartition(".")[0], 0)
        assert of_tensor[layer, slot]["recomputed_calls"] == again, slot


def test_bf16_shows_zero_quantised_operands(run_tiny: RunTiny) -> None:
    by_slot = entries(completed(run_tiny("quant=bf16", *TILED)))
    assert {entry["quantised_calls"] for entry in by_slot.values()} == {0}
    assert {entry["calls"] for entry in by_slot.values()} == {1}


@pytest.fixture
def _read_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of dS's slots is quantised separately, so all of T x T goes through `quantised_tile`."""
    monkeypatch.setattr(tile_products, "shares_read", lambda first, second: False)


def lies_within(name: str) -> Callable[..., Tensor]:
    """A `quantised_tile` that returns P or dS unchanged."""
    original = tile_products.TileProducts.quantised_tile

    def within(self: Any, slot: Any, tile: Any, x: Tensor) -> Tensor:
        return x if slot.operand == name else original(self, slot, tile, x)

    return within


@pytest.mark.usefixtures("_read_for_each")
@pytest.mark.parametrize(("name", "slot"), [("P", "pv.fprop.P"), ("dS", "qk.dgrad_q.dS")])
def test_tiles_that_multiply_the_originals_fail_the_run(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch, name: str, slot: str
) -> None:
    monkeypatch.setattr(tile_products.TileProducts, "quantised_tile", lies_within(name))
    reason = failure(run_tiny(*FULL_MXFP8, *TILED, expect=1))
    assert f"{slot}: declared mxfp8_e4m3" in reason
    assert "are not those of its source: it is not quantised" in reason


@pytest.mark.parametrize(("original", "product"), [(0, "dgrad_q"), (1, "dgrad_k")])
def test_original_beside_a_copy_of_the_same_read_fails_the_run(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch, original: int, product: str
) -> None:
    by_two = tile_products.quantise_pair  # type: ignore[attr-defined]

    def one_of_two(x: Tensor, *rest: Any, **options: Any) -> tuple[Tensor | None, ...]:
        copies = by_two(x, *rest, **options)
        return tuple(x if at == original else copy for at, copy in enumerate(copies))

    monkeypatch.setattr(tile_products, "quantise_pair", one_of_two)
    reason = failure(run_tiny(*FULL_MXFP8, *TILED, expect=1))
    assert f"qk.{product}.dS: declared mxfp8_e4m3" in reason
    assert "are not those of its source: it is not quantised" in reason


def test_one_tile_that_multiplies_the_originals_is_enough(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two: every tile is observed, not only the first."""
    original = tile_products.TileProducts.quantised_tile
    calls: list[int] = []

    def within(self: Any, slot: Any, tile: Any, x: Tensor) -> Tensor:
        calls.append(x.shape[-1])
        return x if slot == FPROP_P and x.shape[-1] > 32 else original(self, slot, tile, x)

    monkeypatch.setattr(tile_products.TileProducts, "quantised_tile", within)
    reason = failure(run_tiny(*FULL_MXFP8, *TILED, expect=1))
    assert set(calls) == {32, 64}
    assert "pv.fprop.P: declared mxfp8_e4m3" in reason


def test_bf16_that_is_quantised_fails_the_run(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantexp.formats import quantise

    monkeypatch.setattr(
        tile_products,
        "quantise_operand",
        lambda x, operand, axis, *args, **kwargs: quantise(x, "mxfp8"),
    )
    assert "elements are not those of its source; it is mxfp8_e4m3" in failure(
        run_tiny("quant=bf16", *TILED, expect=1)
    )


@pytest.mark.usefixtures("_read_for_each")
def test_scale_of_a_tile_in_place_of_the_tensors_fails_the_run(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part under its own amax, stated as the tensor's: every part is on its grid, but they do not agree."""

    def within(self: Any, slot: Any, tile: Any, x: Tensor) -> Tensor:
        spec = self.spec(slot)
        axis = dim_of(slot.operand, spec)
        self.amaxes[slot] = own_amax(x, spec, axis)
        return quantise_operand(x, spec, axis)

    monkeypatch.setattr(tile_products.TileProducts, "quantised_tile", within)
    reason = failure(run_tiny(*FULL_HIFP8, *TILED, expect=1))
    assert "its scale is that of an amax of" in reason
    assert "and its parts have one of" in reason


@pytest.mark.parametrize(
    ("batch", "cut"), [(2, 2), (4, 2)], ids=["every micro-batch", "the first of two"]
)
def test_product_that_leaves_out_its_last_tile_fails_the_run(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch, batch: int, cut: int
) -> None:
    """The number of passes in the first iteration; a micro-batch of the one layer makes two."""
    original = tile_products.tiles  # type: ignore[attr-defined]
    passes: list[int] = []

    def cut_short(*args: Any, **rest: Any) -> list[tiles.Tile]:
        whole = original(*args, **rest)
        passes.append(len(whole))
        return whole[:-1] if len(passes) <= cut else whole

    monkeypatch.setattr(tile_products, "tiles", cut_short)
    words = ("quant=bf16", f"training.global_batch_size={batch}")
    assert "declared bf16, the last part of its product was never multiplied" in failure(
        run_tiny(*words, *TILED, expect=1)
    )
    assert passes == [2] * batch


def test_unannounced_product_fails_the_run(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply = tile_products.multiply  # type: ignore[attr-defined]

    def twice(context: Any, a: Tensor, b: Tensor, scale: float) -> Tensor:
        torch.matmul(a, b)
        return multiply(context, a, b, scale)

    monkeypatch.setattr(tile_products, "multiply", twice)
    assert "that the precision map does not list" in failure(
        run_tiny("quant=bf16", *TILED, expect=1)
    )
