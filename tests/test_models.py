"""The three models in every combination that the command line offers."""

from __future__ import annotations

import pytest

from quantexp.cli.plan_record import make_plan
from quantexp.config.compose import compose
from quantexp.quant.scheme import SCHEMES

PARAMETERS = {
    "llama31-8b": 8_030_261_248,
    "llama32-1b": 1_235_814_400,
    "deepseek2_lite": 15_706_484_224,
}
#: Linear modules with weights: (of the dense layers, of those with experts).
LINEAR = {"llama31-8b": 32 * 4, "llama32-1b": 16 * 4, "deepseek2_lite": 6 + 26 * (4 + 2 + 128)}
LAYERS = {"llama31-8b": 32, "llama32-1b": 16, "deepseek2_lite": 27}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dataset", "scheme"),
    [
        # Every model in every scheme; the dataset changes neither, and meets half of the schemes with each model.
        (model, ("wikipedia", "dolma")[(i + j) % 2], scheme)
        for i, model in enumerate(PARAMETERS)
        for j, scheme in enumerate(SCHEMES)
    ],
)
def test_every_combination_composes_and_plans(model: str, dataset: str, scheme: str) -> None:
    words = [f"model={model}", f"dataset={dataset}", f"quant={scheme}"]
    plan = make_plan(compose(words, None, {}))
    assert (plan.model, plan.dataset, plan.scheme) == (model, dataset, scheme)
    assert plan.parameters == PARAMETERS[model]
    assert len(plan.precision_map) == 6 * LINEAR[model] + 12 * LAYERS[model]
    linear, qk = SCHEMES[scheme]
    for site, choice in (("linear", linear), ("qk", qk)):
        formats = {
            e["format"] for e in plan.precision_map if (e["site"], e["product"]) == (site, "fprop")
        }
        assert formats == {
            {"none": "bf16", "mxfp8": "mxfp8_e4m3", "mxfp4": "mxfp4_e2m1"}.get(choice, choice)
        }


@pytest.mark.parametrize(
    ("model", "layers", "experts", "billions"),
    [("llama31-8b", 1, None, 0.221), ("llama32-1b", 2, None, 0.13), ("deepseek2_lite", 2, 8, 0.19)],
)
def test_the_quick_test_fits_a_laptop(
    model: str, layers: int, experts: int | None, billions: float
) -> None:
    """18 bytes a parameter, and full width: half a layer less would not be the model any more."""
    experiment = compose([f"model={model}", "training=fast"], None, {})
    assert experiment.model.num_layers == layers
    assert (experiment.model.moe.num_experts if experiment.model.moe else None) == experts
    plan = make_plan(experiment)
    assert plan.parameters < billions * 1e9
    assert plan.memory_gb_per_gpu < 6, "as docs/training.md says"
    whole = compose([f"model={model}"], None, {}).model
    for key in ("hidden_size", "ffn_hidden_size", "num_attention_heads", "head_dim", "mla"):
        assert getattr(experiment.model, key) == getattr(whole, key)


def test_cuts_of_the_quick_test_can_be_overridden() -> None:
    words = [
        "training=fast",
        "model=deepseek2_lite",
        "model.num_layers=3",
        "model.moe.num_experts=64",
    ]
    model = compose(words, None, {}).model
    assert model.moe is not None
    assert (model.num_layers, model.moe.num_experts) == (3, 64)
