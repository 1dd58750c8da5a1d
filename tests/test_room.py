"""What would make a run fit: words that do, each tried against the prediction itself."""

from __future__ import annotations

import re

import psutil
import pytest

from quantexp.compose import compose
from quantexp.footprint import memory_parts_gb
from quantexp.plan import make_plan
from quantexp.room import room_gb, way_to_fit

LARGE = ["training=default", "model=llama32-1b", "training.micro_batch_size=2", "quant=FA_mxfp8"]


def needed(*words: str) -> float:
    return sum(memory_parts_gb(compose([*LARGE, *words], None, {})).values())


def way(room: float, *words: str) -> str | None:
    return way_to_fit(compose([*LARGE, *words], None, {}), room)


def test_what_fits_needs_no_way() -> None:
    assert way(needed() + 0.01) is None


@pytest.mark.parametrize("share", [0.9, 0.5, 0.3, 0.2, 0.15])
def test_words_that_are_given_make_it_fit(share: float) -> None:
    room = share * needed()
    told = way(room)
    assert told is not None
    found = re.fullmatch(r"[\d.]+ GB do not fit in [\d.]+ GB: (.*) takes ([\d.]+) GB", told)
    assert found, told
    assert needed(*found[1].split()) <= room
    assert needed(*found[1].split()) == pytest.approx(float(found[2]), abs=0.051)


def test_one_change_is_enough_where_it_is() -> None:
    assert "training.attention=fused takes" in str(way(needed("training.attention=fused") + 0.01))
    room = needed("training.recompute=full") + 0.01
    stochastic = "quant.qk.dgrad_q.dS={format: mxfp4, rounding: stochastic}"
    words = str(way(room, stochastic))
    assert "training.attention" not in words, "no other way takes it"
    assert ": training.recompute=full takes" in words


def test_attention_goes_in_tiles_where_the_fused_kernel_cannot() -> None:
    room = needed("training.attention=tiled") + 0.01
    words = str(way(room, "quant=more/FA_full_mxfp8"))
    assert ": training.attention=tiled takes" in words


def test_layers_go_last_and_what_never_fits_says_so() -> None:
    all_ = ["training.attention=fused", "training.recompute=full", "training.micro_batch_size=1"]
    told = str(way(needed(*all_) - 0.5))
    assert f": {' '.join(all_)} model.num_layers=" in told
    assert str(way(1.0)).endswith(
        f"model.num_layers=1 still takes {needed(*all_, 'model.num_layers=1'):.1f} GB; take a smaller model or another "
        "machine"
    )


def test_room_is_the_machines_share_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantexp.room.device_class", lambda _: "cpu")
    experiment = compose(
        ["training=fast", "launcher.num_processes=2", "training.global_batch_size=4"], None, {}
    )
    assert room_gb(experiment) == pytest.approx(psutil.virtual_memory().total / 2e9)
    assert room_gb(compose(["training=fast", "launcher=slurm"], None, {})) is None


def test_plan_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantexp.plan.room_gb", lambda _: 2.0)
    plan = make_plan(compose(["training=fast"], None, {}))
    assert plan.room_gb == 2.0
    assert plan.to_fit is not None
    assert plan.to_fit.startswith("2.8 GB do not fit in 2.0 GB: ")
