"""Results of evaluations as tables and figures get them."""

from __future__ import annotations

from typing import Any

from quantexp.analysis.evaluation_table import Result


def evaluated(difference: float | None = 0.02, **changes: Any) -> Any:
    loss = None if difference is None else 3.0 + difference
    interval = None if difference is None else [difference - 0.01, difference + 0.01]
    numbers = {
        "layer": None,
        "module": None,
        "tokens": 4096,
        "documents": 57,
        "loss": loss,
        "perplexity": 20.5,
        "bf16_loss": 3.0,
        "difference": difference,
        "interval": interval,
        "accuracy": 0.5,
        "bf16_accuracy": 0.51,
        "same_top": 0.99,
        "divergence": 1e-3,
    }
    return numbers | changes


def result(
    scheme: str, difference: float | None = 0.02, modules: int = 0, **changes: Any
) -> Result:
    each = [
        evaluated(0.001, layer=layer, module=module, divergence=1e-5 * (1 + layer))
        for layer in range(modules)
        for module in (None, "qkv", "fc1")
    ]
    evaluation: Any = {"scheme": evaluated(difference, **changes), "each": each}
    return Result(scheme, "", "completed", evaluation)
