#!/usr/bin/env bash
# triton 3.7.1 with TRITON_INTERPRET=1: bf16 arithmetic adds and multiplies the bits as integers.
#
# Guess: bf16 operands are widened to float32, so that the interpreter gives a GPU's result up to the order of sums.
# Seen: 1 + 1 = 1.7e38, -1 < 1 is false, tl.sum of 1024 ones is 0, tl.dot of 64 ones is 1.7e10, without a warning.
#       A cast of float32 to bf16 truncates: 1.01171875 becomes 1.0078125, where to nearest it is 1.015625.
#       Loads, stores and casts to float32 are right, and so is fp16.
# Why it matters: a kernel is testable in the interpreter only if it casts to float32 after each load, and rounds to
#       bf16 outside of the kernel.
set -euo pipefail
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q 'torch==2.13.0' 'numpy==2.4.6' 'triton==3.7.1'
"$environment/bin/python" -W ignore - <<'END'
import os
import pathlib
import runpy
import tempfile

os.environ["TRITON_INTERPRET"] = "1"
# Triton reads the source of a kernel, so the kernels need a file.
KERNELS = '''
import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x, out, n: tl.constexpr):
    i = tl.arange(0, n)
    one = tl.load(x + i)
    tl.store(out, tl.max((one + one).to(tl.float32), 0))
    tl.store(out + 1, tl.max(tl.where(-one < one, 1.0, 0.0), 0))
    tl.store(out + 2, tl.sum(one, 0).to(tl.float32))


@triton.jit
def dot(x, out, n: tl.constexpr):
    i = tl.arange(0, n)
    at = i[:, None] * n + i[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(x + at)))


@triton.jit
def cast(x, out, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out + i, tl.load(x + i).to(tl.bfloat16).to(tl.float32))


def results(dtype):
    out = torch.zeros(3)
    kernel[(1,)](torch.ones(1024, dtype=dtype), out, 1024)
    products = torch.zeros(64, 64)
    dot[(1,)](torch.ones(64, 64, dtype=dtype), products, 64)
    return [*out.tolist(), products[0, 0].item()]


def bf16(value):
    out = torch.zeros(4)
    cast[(1,)](torch.full((4,), value), out, 4)
    return out[0].item(), torch.tensor(value).to(torch.bfloat16).item()
'''
with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder, "kernels.py")
    file.write_text(KERNELS)
    functions = runpy.run_path(str(file))
    torch = functions["torch"]
    half, brain = functions["results"](torch.float16), functions["results"](torch.bfloat16)
    casts = functions["bf16"](1.01171875)
print("1 + 1, -1 < 1, sum of 1024 ones, dot of 64 ones: fp16", half, "bf16", brain)
print("bf16 of 1.01171875: interpreter and torch", casts)
assert half == [2, 1, 1024, 64]
assert brain[0] > 1e38
assert brain[1:3] == [0, 0]
assert brain[3] > 1e10
assert casts == (1.0078125, 1.015625)
END
