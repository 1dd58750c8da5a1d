"""The test set-up itself: Transformer Engine's Python runs, and refuses what it refuses on the pretended machine."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.extras.transformer_engine.rank.child import B200, H100, Child
from tests.extras.transformer_engine.rank.wheels import unpacked_wheel


def versions() -> tuple[str, bool]:
    import transformer_engine
    from megatron.core.extensions import transformer_engine as extension

    return transformer_engine.__version__, issubclass(
        extension.TEColumnParallelLinear, transformer_engine.pytorch.Linear
    )


def test_megatrons_linear_layers_are_those_of_the_version(each_te: Child) -> None:
    assert each_te.run(versions) == (each_te.version, True)


def mxfp8_support() -> tuple[bool, str]:
    from transformer_engine.pytorch import is_mxfp8_available

    available: tuple[bool, str] = is_mxfp8_available(return_reason=True)
    return available


def test_the_pretended_capability_decides_what_is_supported(each_te: Child) -> None:
    assert each_te.run(mxfp8_support, capability=B200) == (True, "")
    supported, reason = each_te.run(mxfp8_support, capability=H100)
    assert not supported
    assert "10.0 or higher" in reason


def slots_of_a_recipe(name: str) -> list[str]:
    import torch
    from transformer_engine.common import recipe
    from transformer_engine.pytorch.quantization import RecipeState

    names = []
    for mode, count in (("forward", 3), ("backward", 2)):
        state = RecipeState.create(
            getattr(recipe, name)(), mode=mode, num_quantizers=count, device=torch.device("cpu")
        )
        names += [type(quantizer).__name__ for quantizer in state.make_quantizers()]
    return names


@pytest.mark.parametrize(
    ("recipe", "quantizer"),
    [
        ("DelayedScaling", "Float8Quantizer"),
        ("Float8CurrentScaling", "Float8CurrentScalingQuantizer"),
        ("MXFP8BlockScaling", "MXFP8Quantizer"),
        ("Float8BlockScaling", "Float8BlockQuantizer"),
        ("NVFP4BlockScaling", "NVFP4Quantizer"),
    ],
)
def test_a_recipe_makes_its_quantizers(each_te: Child, recipe: str, quantizer: str) -> None:
    assert each_te.run(slots_of_a_recipe, recipe) == [quantizer] * 5


def products_of_a_layer() -> list[tuple[bool, bool]]:
    """The (transa, transb) of a plain layer's products, from the one function that multiplies."""
    import torch
    import transformer_engine.pytorch as te
    import transformer_engine_torch as native

    calls = []

    def generic_gemm(A: Any, transa: bool, B: Any, transb: bool, *args: Any, **kwargs: Any) -> Any:
        calls.append((transa, transb))
        left, right = (x.reshape(-1, x.shape[-1]) for x in (B, A))
        product = (left.t() if transb else left) @ (right.t() if transa else right)
        return product.reshape(*B.shape[:-1], -1) if not transb else product, None, None, None

    native.generic_gemm = generic_gemm
    layer = te.Linear(32, 64, bias=False, params_dtype=torch.float32, device="cpu")
    x = torch.randn(4, 2, 32, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    torch.testing.assert_close(y, x @ layer.weight.t())
    torch.testing.assert_close(x.grad, torch.ones(4, 2, 64) @ layer.weight)
    return calls


def test_a_layer_multiplies_in_one_function_forward_and_backward(each_te: Child) -> None:
    assert each_te.run(products_of_a_layer) == [(True, False), (False, False), (False, True)]


def test_a_wheel_that_cannot_be_downloaded_fails_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_index(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", no_index)
    with pytest.raises(
        RuntimeError, match=r"need the wheel transformer-engine==1\.2\.3 .*No match"
    ):
        unpacked_wheel("1.2.3")
