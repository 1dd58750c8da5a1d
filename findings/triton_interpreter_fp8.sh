#!/usr/bin/env bash
# triton 3.7.1 with TRITON_INTERPRET=1: casts to and from float8 know no NaN and no Inf, and do not saturate.
#
# Guess: tl.float8e4nv saturates or gives NaN above 448, keeps NaN, and rounds ties to even, as on a GPU.
# Seen, float32 to float8e4nv and back: 1000 -> 256, Inf -> 256, NaN -> 384, 464 -> 480 (its code, 0x7F, is NaN);
#       1.0625, a tie, -> 1.125; 63 -> 64, and 126 -> 64 too: a carry into an odd exponent is lost. Decoding the codes of
#       NaN gives 480. float8e5: Inf -> 65536, NaN -> 98304.
# Why it matters: tests of a float8 kernel in the interpreter pass or fail by other rules than the GPU's. Compare bytes
#       that the kernel computes by integer arithmetic, or clamp before the cast and avoid ties. In Quartet II's
#       published NVFP4 kernels 24 of 2,048 blocks of normal numbers had half of their scale.
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
def cast(x, out, dtype: tl.constexpr, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out + i, tl.load(x + i).to(dtype).to(tl.float32))


def run(values, dtype):
    out = torch.zeros(len(values))
    cast[(1,)](values, out, dtype, len(values))
    return out.tolist()
'''
with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder, "kernels.py")
    file.write_text(KERNELS)
    functions = runpy.run_path(str(file))
    torch, tl, run = functions["torch"], functions["tl"], functions["run"]
    values = torch.tensor([1000.0, float("inf"), float("nan"), 464.0, 1.0625, 126.0, 63.0, -1.0])
    e4m3 = run(values, tl.float8e4nv)
    e5m2 = run(values, tl.float8e5)
    decoded = run(torch.tensor([0x7F, 0xFF], dtype=torch.uint8).view(torch.float8_e4m3fn), tl.float32)
print("float8e4nv", e4m3, "float8e5", e5m2, "codes 0x7F and 0xFF", decoded)
assert e4m3 == [256, 256, 384, 480, 1.125, 64, 64, -1]
assert e5m2[1:3] == [65536, 98304]
assert decoded == [480, -480]
END
