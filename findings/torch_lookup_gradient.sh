#!/usr/bin/env bash
# torch 2.13.0, CPU, bf16: the gradient of a table's row depends on which function looks the row up.
#
# Guess: all of them add in bf16 and stop at 256, or all add in float32.
# Seen: row 0 is looked up 1000 times, each time with the gradient 1. Its gradient is 256 with F.embedding,
#       weight[index] and take, and 1000 with index_select, gather and take_along_dim. index_add_
#       itself adds 1000 ones to 256 in one dimension, to 1000 in two.
# Why it matters: embedding gradients of frequent tokens lose most of their sum, and two implementations of the same
#       embedding train differently. Nothing about the number format of the matrix products is the cause.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6'
"$environment/bin/python" -W ignore - <<'END'
from collections.abc import Callable

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
index = torch.zeros(1000, dtype=torch.long)
lookups: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "embedding": lambda table: F.embedding(index, table),
    "weight[index]": lambda table: table[index],
    "take": lambda table: table.take(index),
    "index_select": lambda table: table.index_select(0, index),
    "gather": lambda table: table.gather(0, index[:, None].expand(1000, 8)),
    "take_along_dim": lambda table: table.take_along_dim(index[:, None], 0),
}
seen = {}
for name, lookup in lookups.items():
    table = torch.zeros(4, 8, dtype=torch.bfloat16, requires_grad=True)
    lookup(table).sum().backward()
    seen[name] = table.grad[0, 0].item()
for shape in ((), (8,)):
    total = torch.zeros(4, *shape, dtype=torch.bfloat16)
    total.index_add_(0, index, torch.ones(1000, *shape, dtype=torch.bfloat16))
    seen[f"index_add_ of {1 + len(shape)} dimensions"] = total.flatten()[0].item()
print(seen)
assert list(seen.values()) == [256, 256, 256, 1000, 1000, 1000, 256, 1000]
END
