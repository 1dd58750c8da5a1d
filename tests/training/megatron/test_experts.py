"""The sequence of each row of an expert, in the order in which Megatron's dispatchers deliver rows."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe import moe_utils

from quantexp.runs.paths import RunDir
from quantexp.training.megatron.experts import (
    forget_balancing_loss,
    origins_of_exchanged,
    take_balancing_loss,
)
from tests.gloo import in_processes
from tests.training.megatron.dispatch_ranks import DISPATCHERS, LAYOUTS, B, Expert, dispatch


def test_exchanged_rows_lie_by_expert_tensor_rank_and_expert_rank() -> None:
    """6 members: 3 expert ranks with 2 expert-tensor ranks each; this rank has experts 1 and 2."""
    routed = torch.rand(6, 5, 4, generator=torch.Generator().manual_seed(1)) > 0.5
    expected = [
        (2 * expert_rank + tensor_rank, token)
        for expert, tensor_rank, expert_rank in product((1, 2), range(2), range(3))
        for token in range(5)
        if routed[2 * expert_rank + tensor_rank, token, expert]
    ]
    member, token = origins_of_exchanged(routed, [1, 2], expert_tensor=2)
    assert list(zip(member.tolist(), token.tolist(), strict=True)) == expected


@pytest.fixture(params=["before 0.18", "since 0.18"])
def tracked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Megatron's sums of balancing losses by kind; 0.18 still has the former function, which returns a copy."""
    entries: dict[str, Any] = {}
    getters: dict[str, Callable[[], Any]] = {"get_moe_layer_wise_logging_tracker": lambda: entries}
    if request.param == "since 0.18":
        tracker = SimpleNamespace(metrics=entries)
        getters = {
            "get_moe_layer_wise_logging_tracker": lambda: dict(entries),
            "get_moe_metrics_tracker": lambda: tracker,
        }
    else:
        monkeypatch.delattr(moe_utils, "get_moe_metrics_tracker", raising=False)
    for name, getter in getters.items():
        monkeypatch.setattr(moe_utils, name, getter, raising=False)
    entry: Callable[..., Any] = SimpleNamespace if request.param == "since 0.18" else dict
    for kind, values in (("load_balancing_loss", [1.0, 2.0]), ("z_loss", [0.0, 4.0])):
        entries[kind] = entry(values=torch.tensor(values))
    return entries


def test_a_balancing_loss_is_taken_once(tracked: dict[str, Any]) -> None:
    device = torch.device("cpu")
    assert take_balancing_loss(device) == 7.0
    assert take_balancing_loss(device) == 0.0
    assert tracked


def test_the_balancing_losses_of_an_earlier_model_are_dropped(tracked: dict[str, Any]) -> None:
    forget_balancing_loss()
    assert not tracked


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], list[Expert]]]:
    return in_processes(dispatch, 2, tmp_path_factory.mktemp("dispatch"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", DISPATCHERS)
def test_rows_have_the_source_and_the_column_of_their_tokens(
    reports: list[dict[tuple[str, str], list[Expert]]], layout: str, kind: str
) -> None:
    for rank, report in enumerate(reports):
        micro_batches = (-rank, 1 - rank) if layout == "ep2" else (0,)
        for truth, said, sizes in report[layout, kind]:
            assert len(truth) > 4
            assert said == [(source, column) for source, column, _ in truth]
            assert sizes == (len(micro_batches) * B, micro_batches)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", DISPATCHERS)
def test_rows_of_a_sequence_lie_in_its_order(
    reports: list[dict[tuple[str, str], list[Expert]]], layout: str, kind: str
) -> None:
    for report in reports:
        for truth, _, _ in report[layout, kind]:
            for sequence in {row[:2] for row in truth}:
                positions = [row[2] for row in truth if row[:2] == sequence]
                assert positions == sorted(positions)


def test_a_run_leaves_no_model_behind(
    run_tiny: Callable[..., RunDir], tiny_models: dict[str, list[str]]
) -> None:
    """Megatron's dispatcher would keep the graph of its last pass, and with it the model and its process groups."""

    def models() -> int:
        gc.collect()
        return sum(type(each) is GPTModel for each in gc.get_objects())

    before = models()
    run_tiny(*tiny_models["deepseek2_lite"], "quant=linear_mxfp4", "capture=off")
    assert models() == before
