#!/usr/bin/env bash
# torch 2.13.0, CPU: the mean of cross_entropy is formed in the dtype of the logits.
#
# Guess: the losses are summed in float32 and the mean is rounded once, as in torch.mean.
# Seen: fp16, 32768 tokens with losses of 8.5 on average: the mean is Inf, because the sum exceeds 65504.
#       reduction="none" and then mean() gives 8.46.
#       bf16, 4096 tokens: 11.125, where the mean is 11.2298, so 11.25; torch.sum of the same losses is 46080, the
#       reduction's own sum 45568.
# Why it matters: an evaluation without .float() has an error of one percent, or reports an overflow of the model.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
"$environment/bin/python" -W ignore - <<'END'
import torch
import torch.nn.functional as F

torch.set_num_threads(1)


def batch(tokens: int, classes: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return (torch.randn(tokens, classes) * 3).to(dtype), torch.randint(0, classes, (tokens,))


logits, targets = batch(32768, 100, torch.float16)
losses = F.cross_entropy(logits, targets, reduction="none")
mean = F.cross_entropy(logits, targets)
print("fp16: mean", mean.item(), "largest loss", losses.max().item(), "mean()", losses.mean().item())
assert mean.isinf()
assert abs(losses.mean().item() - 8.46) < 0.01

logits, targets = batch(4096, 1000, torch.bfloat16)
exact = F.cross_entropy(logits.double(), targets)
losses = F.cross_entropy(logits, targets, reduction="none")
total = F.cross_entropy(logits, targets, reduction="sum")
mean = F.cross_entropy(logits, targets)
print("bf16: mean", mean.item(), "exact", exact.item(), "sum", total.item(), "torch.sum", losses.sum().item())
assert mean != exact.to(torch.bfloat16)
assert total != losses.sum()
END
