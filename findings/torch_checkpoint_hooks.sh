#!/usr/bin/env bash
# torch 2.13.0: a gradient hook that is registered in a reentrant checkpoint's first pass silences all later ones.
#
# Guess: in the first pass, which has no graph, nothing requires a gradient; and a hook on what the checkpoint returns is
#       called once in the backward pass.
# Seen: where the function enables gradients for one operation, as Megatron-Core's layers do for their sum with the
#       residual stream, its result requires a gradient in the first pass. The checkpoint returns that tensor with another
#       node. A hook that a forward hook of a module registered is never called on it, and neither is any that is
#       registered afterwards, outside of the checkpoint: 0 calls instead of 1, without a word. retain_grad works.
# Why it matters: a probe of layers' outputs under full recomputation takes the gradients away from every other probe.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
"$environment/bin/python" -W ignore - <<'END'
import torch
from torch.utils.checkpoint import checkpoint


class Sum(torch.nn.Module):
    def forward(self, x):
        with torch.enable_grad():
            return x + 1


def calls(has_probe):
    module, seen = Sum(), []
    if has_probe:
        module.register_forward_hook(lambda _, args, y: y.register_hook(lambda g: None) and None)
    x = torch.ones(2, requires_grad=True)
    y = checkpoint(module, x, use_reentrant=True)
    y.register_hook(seen.append)
    y.retain_grad()
    y.sum().backward()
    assert x.grad.tolist() == y.grad.tolist() == [1.0, 1.0]
    return len(seen)


print(torch.__version__, "calls without a probe", calls(False), "with one", calls(True))
assert calls(False) == 1
assert calls(True) == 0
END
