"""Compares the forward pass of more/FA_bf16_flash and of its remedy with the authors' code of arXiv 2510.04212.

    git clone https://github.com/ucker/why-low-precision-training-fails; git -C ... checkout 02f0ab6
    python benchmarks/flash_authors.py why-low-precision-training-fails

Their attention runs on a CPU in one tile of keys, with matrix products in bf16 and exp in float32, as autocast on a GPU
has them. Autocast also rounds S - m and the row sums to bf16; the lines say how many elements of o differ with these in
bf16, and with both in float32, as quantexp and flash attention's kernels have them. Scores have a common part, so that
some rows have their maximum several times.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from quantexp.quant.attention.call import AttentionCall  # noqa: E402
from quantexp.quant.attention.plain import context, scores  # noqa: E402
from quantexp.quant.attention.row_sums import Exponentials, masked  # noqa: E402
from tests.quant.attention.kernels.tiled_cases import declared  # noqa: E402

#: Sequences, heads, tokens, head_dim: its root, the softmax's scale, is a power of two.
B, H, T, D = 2, 4, 256, 64
_BF16 = torch.bfloat16


def main() -> None:
    """Print a line for each sample, with and without the remedy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the clone")
    attend = flash_of(parser.parse_args().folder)
    for seed in range(3):
        q, k, v = sample(seed)
        S = masked(of_scores(q, k), None)
        rows = int((S.eq(S.amax(-1, keepdim=True)).sum(-1) > 1).sum())
        for factor in (None, 2.0):
            o = ours(q, k, v, factor)
            in_bf16, in_fp32 = (
                int((o != attend(q, k, v, factor is not None, wide)).sum())
                for wide in (False, True)
            )
            sys.stdout.write(
                f"sample {seed}, beta {factor}, {rows} of {B * H * T:,} rows with a repeated maximum: of "
                f"{o.numel():,} elements {in_bf16:,} differ with S - m and sums in bf16, {in_fp32} in float32\n"
            )


def sample(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, [B, H, T, D], keys with a common part."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, H, T, D, generator=generator) for _ in range(3))
    k += 1.5 * torch.randn(1, H, 1, D, generator=generator)
    return q.to(_BF16), k.to(_BF16), v.to(_BF16)


def _by_token(x_BHTD: Tensor) -> Tensor:
    return x_BHTD.permute(2, 0, 1, 3).contiguous()


def of_scores(q: Tensor, k: Tensor) -> Tensor:
    """S, [B, H, T, T], by quantexp."""
    call = AttentionCall(declared("quant=bf16"), D**-0.5)
    return scores(call, _by_token(q), _by_token(k)).view(B, H, T, T)


def ours(q: Tensor, k: Tensor, v: Tensor, factor: float | None) -> Tensor:
    """o, [B, H, T, D], by quantexp."""
    E, sums = Exponentials()(of_scores(q, k), None, factor)
    call = AttentionCall(declared("quant=bf16"), D**-0.5)
    exponentials = E.view(B * H, T, T), sums.view(B * H, T, 1)
    return context(call, exponentials[0], _by_token(v), exponentials).view(B, H, T, D)


def flash_of(folder: Path) -> Callable[[Tensor, Tensor, Tensor, bool, bool], Tensor]:
    """Their forward pass: of q, k and v, with or without the remedy, with S - m and sums in float32 or not."""
    spec = importlib.util.spec_from_file_location("flash", folder / "attention.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, {"einops": MagicMock()}):  # used for masks of padding alone
        spec.loader.exec_module(module)
    einsum, exp, zeros = torch.einsum, torch.exp, torch.zeros

    def attend(q: Tensor, k: Tensor, v: Tensor, is_stable: bool, is_wide: bool) -> Tensor:
        def product(equation: str, x: Tensor, y: Tensor) -> Tensor:
            result = einsum(equation, x.to(_BF16), y.to(_BF16))
            return result.float() if is_wide else result

        def sums(*size: Any, dtype: torch.dtype, **more: Any) -> Tensor:
            return zeros(*size, dtype=torch.float32 if is_wide else dtype, **more)

        with (
            patch.object(module, "einsum", product),
            patch.object(torch, "exp", lambda x: exp(x.float())),
            patch.object(torch, "zeros", sums),
            patch.dict(os.environ, {"STABLE": str(int(is_stable))}),
        ):
            o: Tensor = module.FlashAttentionFunction.apply(q, k, v, None, True, T, T)
        return o

    return attend


if __name__ == "__main__":
    main()
