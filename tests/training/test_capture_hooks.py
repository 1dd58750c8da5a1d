"""The metadata of an expert's rows, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from quantexp.config.compose import compose
from quantexp.quant.precision import ModuleId, ModulePrecision, precision_map
from quantexp.quant.rows import Rows
from quantexp.quant.step_state import StepState, use_step_state
from quantexp.training.capture_hooks import row_metadata

SEQUENCE = torch.tensor([1, 0, 0])


def declared(*words: str) -> ModulePrecision:
    experiment = compose(["training=fast", *words], None, {})
    precision = precision_map(experiment.model, experiment.quant)[ModuleId(0, "fc1")]
    return replace(precision, module=ModuleId(0, "expert0-fc1"))


def sources_of(metadata: dict[str, object]) -> list[dict[str, dict[str, Any]]]:
    sources = metadata["row_sources"]
    assert isinstance(sources, list)
    assert len(sources) == 2
    return sources


def test_each_micro_batch_has_its_random_numbers_and_signs() -> None:
    precision = declared("quant=more/linear_mxfp4_sr_rht")
    with use_step_state(StepState(1, 2, 4)) as state:
        metadata = row_metadata(precision, Rows(SEQUENCE, 2, (0, 1)))
        own = {str(slot): state.record(spec) for slot, spec in precision.slots.items()}
    assert metadata["row_sequences"] == [1, 0, 0]
    first, second = sources_of(metadata)
    assert set(first) == set(second) == {"dgrad.g", "dgrad.w", "wgrad.g", "wgrad.x"}
    for key, of_first in first.items():
        assert of_first == own[f"linear.{key}"]
        assert second[key]["seed"] == of_first["seed"]
        assert second[key]["offset"] == of_first["offset"] + 1 == 2 * 2**32 + 5
        assert second[key]["signs"] != of_first["signs"]


def test_weight_of_a_step_is_not_listed() -> None:
    precision = declared("quant=linear_mxfp4", "quant.linear.rounding=stochastic")
    with use_step_state(StepState(1, weights_once=True)):
        metadata = row_metadata(precision, Rows(SEQUENCE, 2, (0, 1)))
    for source in sources_of(metadata):
        assert set(source) == {"fprop.x", "dgrad.g", "wgrad.g", "wgrad.x"}


def test_rows_of_one_micro_batch_or_without_numbers_have_sequences_alone() -> None:
    sequences = {"row_sequences": [1, 0, 0]}
    with use_step_state(StepState(1)):
        drawn = declared("quant=more/linear_mxfp4_sr_rht")
        assert row_metadata(drawn, Rows(SEQUENCE, 2)) == sequences
        assert row_metadata(declared("quant=linear_mxfp4"), Rows(SEQUENCE, 2, (0, 1))) == sequences
