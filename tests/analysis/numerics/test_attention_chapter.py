from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from quantexp.analysis.chapter import Source
from quantexp.analysis.numerics.attention_chapter import CHAPTER
from tests.analysis.captures import Capture

from .desks import MemoryDesk, add_run, normal, source_of


@pytest.fixture
def desk(tmp_path: Path) -> MemoryDesk:
    return MemoryDesk(tmp_path / "out", lays_out=True)


def masked(source: Source) -> Source:
    """The source of a run whose tokens attend only to their own document."""
    return replace(source, names=replace(source.names, mask_documents=True))


def words(desk: MemoryDesk, name: str) -> str:
    return " ".join(text.get_text() for text in desk.figures[name].texts)


def test_recomputed_maps_are_labelled_and_show_no_future(
    capture: Capture, desk: MemoryDesk
) -> None:
    add_run(capture, layers=2)
    CHAPTER.draw([source_of(capture)], desk)
    assert set(desk.figures) == {"L0", "L1"}
    assert "P recomputed from query and key before quantisation" in words(desk, "L1")
    maps = [ax for ax in desk.figures["L0"].axes if ax.get_title(loc="left").startswith("head")]
    assert len(maps) == 4
    pixels = maps[0].images[0].get_array()
    assert pixels is not None
    assert np.array_equal(np.ma.getmaskarray(pixels), np.triu(np.ones((64, 64)), 1).astype(bool))


def test_keys_of_other_documents_are_grey(capture: Capture, desk: MemoryDesk) -> None:
    add_run(capture, layers=1)
    for line in capture.lines:
        if line["tensor"] == "query":
            line["document_starts"] = [[0, 10]]
    capture.write()
    CHAPTER.draw([masked(source_of(capture))], desk)
    assert "grey: keys behind the mask, causal and within documents" in words(desk, "L0")
    image = next(ax.images[0] for ax in desk.figures["L0"].axes if ax.images).get_array()
    grey = np.ma.getmaskarray(image)  # type: ignore[arg-type]
    assert grey[10:, :10].all()
    assert not grey[10:, 10:].diagonal().any()
    assert desk.messages == []


def test_unknown_masks_are_reported_and_no_triangle_is_drawn(
    capture: Capture, desk: MemoryDesk
) -> None:
    add_run(capture, layers=2)
    capture.add(torch.softmax(normal(1, 2, 16, 16).float(), -1), "attn_weights", "attention", 2)
    CHAPTER.draw([masked(source_of(capture))], desk)
    assert set(desk.figures) == {"L2"}, "P itself is what was captured"
    (message,) = desk.messages
    assert (
        "attention of 2 modules not drawn: dataset.mask_documents kept documents apart" in message
    )
    assert message.endswith("capture again, or with capture.attn_weights=true")


def test_gradients_stand_beside_captured_maps(capture: Capture, desk: MemoryDesk) -> None:
    capture.add(torch.softmax(normal(1, 2, 16, 16).float(), -1), "attn_weights", "attention", 0)
    capture.add(normal(1, 2, 16, 16, scale=2.0**-10), "grad_attn_weights", "attention", 0)
    CHAPTER.draw([source_of(capture)], desk)
    figure = desk.figures["L0"]
    assert sum(bool(ax.images) for ax in figure.axes) == 2 * 2
    assert "P as captured" in words(desk, "L0")
    assert "right of each map the gradient of P" in words(desk, "L0")


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_maps_of_zeros_or_nan_are_drawn(capture: Capture, desk: MemoryDesk, value: float) -> None:
    capture.add(torch.full((1, 1, 8, 8), value), "attn_weights", "attention", 0)
    capture.add(torch.full((1, 1, 8, 8), value), "grad_attn_weights", "attention", 0)
    CHAPTER.draw([source_of(capture)], desk)
    assert ("white: NaN" in words(desk, "L0")) == (value != value)


def test_the_first_and_the_last_iteration_are_drawn_and_the_number_left_out_is_reported(
    capture: Capture, desk: MemoryDesk
) -> None:
    add_run(capture, layers=1, iterations=3, ranks=2)
    source = source_of(capture)
    CHAPTER.draw([source], desk)
    assert set(desk.figures) == {"L0_iteration1", "L0_iteration3"}
    (message,) = desk.messages
    assert message.endswith("first micro-batch, rank 0, is drawn: 2 of 6")


def test_the_map_of_a_long_sequence_explains_its_pixels(capture: Capture, desk: MemoryDesk) -> None:
    capture.add(torch.full((1, 1, 512, 512), 1 / 512), "attn_weights", "attention", 0)
    CHAPTER.draw([source_of(capture)], desk)
    assert "a pixel is the largest P (mean gradient) of 2 x 2 tokens" in words(desk, "L0")


def test_attention_that_cannot_be_drawn_is_reported(capture: Capture, desk: MemoryDesk) -> None:
    capture.add(normal(8, 1, 2, 16), "key", "attention", 0)
    capture.add(normal(8, 8), "attn_weights", "attention", 1)
    assert CHAPTER.draw([source_of(capture)], desk) == []
    without, refused = sorted(desk.messages, key=lambda line: "not drawn" in line)
    assert "1 attention modules without maps: neither attn_weights nor query and key" in without
    assert "attention of layer 1 not drawn" in refused
