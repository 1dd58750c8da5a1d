"""Sources that the watcher has seen, and whether a module has changed them since."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quantexp.proof.call import Call
from quantexp.proof.draws import Moment
from quantexp.proof.histories import Histories
from quantexp.quant.precision import ModuleId, ModulePrecision
from quantexp.quant.sites import Operand

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1),
    "a part of each head": lambda x: x[:, 1:, :, 3:40],
    "one sequence": lambda x: x[:, 1],
    "without elements": lambda x: x[:0],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_source_that_changes_is_seen_in_every_layout(layout: str, dtype: torch.dtype) -> None:
    whole = torch.randn(32, 2, 3, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole[0] = torch.nan
    x = LAYOUTS[layout](whole)
    call = Call(
        ModulePrecision(ModuleId(0, "attention"), {}), Moment(1, 1), lambda _, a: a, Histories()
    )
    call.see(Operand.Q, x)
    assert call.is_unchanged(Operand.Q), "NaN equals itself"
    x[..., : x.shape[-1] // 2] *= -1
    assert call.is_unchanged(Operand.Q) is (x.numel() == 0)
    assert call.is_unchanged(Operand.K), "it was not seen"
