"""MX and NVFP4 against torchao's reference, where it follows the definitions (see `torchao_oracle`)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantexp.extras.verify.exact import Case, answer
from quantexp.extras.verify.oracles import torchao_oracle
from quantexp.extras.verify.rational import SCALE_RULES
from quantexp.formats import encode

from .tensors import every_finite_value


def blocks(block: int) -> torch.Tensor:
    """All bf16 values by magnitude and shuffled, and float32 values of many magnitudes."""
    values = every_finite_value(torch.bfloat16).float()
    by_magnitude = values[values.abs().argsort(stable=True)]
    shuffled = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(1))]
    random = torch.randn(2048, 32, generator=torch.Generator().manual_seed(2))
    random *= torch.randn(2048, 1, generator=torch.Generator().manual_seed(3)).mul(9).exp()
    return torch.cat([v.view(-1, block) for v in (by_magnitude, shuffled, random)])


@pytest.mark.parametrize("name", torchao_oracle.TYPES)
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_mx_codes_and_scales_are_torchaos(name: str, rule: str) -> None:
    x = blocks(32)
    codes, scales = encode(x, name, scale_rule=rule)
    case = Case(name, x.numpy(), options={"scale_rule": rule})
    theirs = torchao_oracle.blocks(case, answer(case))
    assert theirs is not None
    assert theirs.known is not None
    assert theirs.known_blocks is not None
    assert theirs.answer.codes is not None
    assert theirs.answer.block_scales is not None
    assert theirs.known.mean() > 0.9
    assert np.array_equal(
        scales.numpy()[theirs.known_blocks], theirs.answer.block_scales[theirs.known_blocks]
    )
    assert np.array_equal(codes.numpy()[theirs.known], theirs.answer.codes[theirs.known])


@pytest.mark.parametrize("t", [1.0, 2.0**-20, 0.37])
def test_nvfp4_codes_and_scales_are_torchaos(t: float) -> None:
    """Except for elements within one rounding of a tie, of which there are few."""
    x = blocks(16)
    x = x[x.abs().amax(dim=-1) / 6 / t < 1e4]
    codes, scales = encode(x, "nvfp4", amax=torch.tensor(t) * 2688)
    assert scales.tensor == torch.tensor(t)
    case = Case("nvfp4_e2m1", x.numpy(), options={"amax": 2688 * t})
    theirs = torchao_oracle.blocks(case, answer(case))
    assert theirs is not None
    assert theirs.known is not None
    assert theirs.known_blocks is not None
    assert theirs.answer.codes is not None
    assert theirs.answer.block_scales is not None
    assert theirs.known_blocks.mean() > 0.2
    assert theirs.known.mean() > 0.99 * theirs.known_blocks.mean()
    assert np.array_equal(
        scales.block.numpy()[theirs.known_blocks], theirs.answer.block_scales[theirs.known_blocks]
    )
    assert np.array_equal(codes.numpy()[theirs.known], theirs.answer.codes[theirs.known])
