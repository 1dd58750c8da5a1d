"""The measured rates of a machine, kept in the cache: they are measured once, and equal plans have equal times.

`quantexp doctor` measures again, for instance after other programs occupied the machine during the first measurement. A
machine is another one if its name, processor, cores, threads, GPU, or version of torch differ.

The rate of matrix products is that of the three products of a linear layer, y = x w^T, dx = g w and dw = g^T x, of
square matrices, because a kernel may be fast for one order of the operands and slow for another. The measurement
multiplies as training does: through fp32 on a CPU without instructions for the precision. Each size is sampled several
times and the best sample counts. The size doubles while the next one fits the time budget, so a device that is a
thousand times slower takes no longer.

On a CPU with several threads the measurement is repeated with one thread, and the larger rate counts: when other
programs occupy a core, every thread waits for the one that was interrupted. The result is cached for the process. The
first measurement imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from quantexp.errors import UnreadableError
from quantexp.processes.machine import allowed_cores
from quantexp.reading.json_files import read_json
from quantexp.reading.typed import Rule
from quantexp.runs.device import LIMITS, multiplies_natively
from quantexp.runs.provenance import versions
from quantexp.runs.status import write_json
from quantexp.schema import Precision

if TYPE_CHECKING:
    import torch


#: Elements of the measured copy: 32 MiB, larger than most caches of one core.
_COPY_ELEMENTS = 1 << 23
_Rate = Annotated[float, Rule("a number above 0", lambda rate: rate > 0)]


@dataclass(frozen=True)
class Rates:
    """What a device of the machine does in a second."""

    #: 1e9 floating-point operations of matrix products, measured with so many threads.
    gflop_per_s: _Rate
    num_threads: _Rate
    #: Bytes that a copy reads and writes.
    copied_bytes_per_s: _Rate


def rates_of(precision: Precision, device: str, folder: Path) -> Rates | None:
    """The rates that `folder` has, or else measured ones; `device` is a `device_class` of this machine.

    None if the GPU has no memory free for a measurement.
    """
    with contextlib.suppress(OSError, UnreadableError):
        return read_json(_file(precision, device, folder), Rates, 1 << 12)
    return measured_rates(precision, device, folder)


def measured_rates(precision: Precision, device: str, folder: Path) -> Rates | None:
    """Measure the rates and keep them, if `folder` can be written; None as of `rates_of`."""
    import torch

    place = torch.device("cpu" if device == "cpu" else "cuda")
    try:
        products, copies = product_gflop_per_s(precision, place), copied_bytes_per_s(place)
    except torch.OutOfMemoryError:
        return None
    rates = Rates(products, torch.get_num_threads(), copies)
    file = _file(precision, device, folder)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, asdict(rates))
    return rates


@cache
def copied_bytes_per_s(device: torch.device) -> float:
    """Bytes that a copy reads and writes in a second, measured once in a process."""
    import torch

    source = torch.ones(_COPY_ELEMENTS, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(3):  # the first copy allocates its memory
        start = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * 4 * _COPY_ELEMENTS / min(seconds)


def _file(precision: Precision, device: str, folder: Path) -> Path:
    """The file of a precision and a device of this machine; a shared home has those of many machines."""
    about = [
        platform.node(),
        _processor(),
        len(allowed_cores()),
        *(os.environ.get(name) for name in ("OMP_NUM_THREADS", *LIMITS)),
        versions()["torch"],
        device,
        precision.value,
    ]
    name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
    return folder / "rates" / f"{name}.json"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line
    return platform.processor()


#: The approximate maximum time of a measurement, seconds.
BUDGET_S = 0.3
#: Rows and columns of the smallest matrices, and of the largest on a CPU and on a GPU.
_FIRST, _LARGEST_CPU, _LARGEST_GPU = 64, 2048, 8192
#: The three products of size N take this many times N^3 floating-point operations.
_FLOP = 3 * 2
#: Samples of each size.
_SAMPLES = 3
#: The next size takes eight times the time, for one warm-up call and every sample.
_NEXT = 8 * (1 + _SAMPLES)


@cache
def product_gflop_per_s(precision: Precision, device: torch.device) -> float:
    """The best measured GFLOP/s (1e9) of matrix products in this precision."""
    import torch

    from quantexp.quant.products import through_fp32

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    dtype = dtypes[precision.value]
    is_native = device.type != "cpu" or multiplies_natively(precision)
    with through_fp32([] if is_native else [dtype]):
        num_threads = torch.get_num_threads()
        if device.type != "cpu" or num_threads == 1:
            return _best_rate(dtype, device, BUDGET_S)
        best = _best_rate(dtype, device, BUDGET_S / 2)
        torch.set_num_threads(1)
        try:
            return max(best, _best_rate(dtype, device, BUDGET_S / 2))
        finally:
            torch.set_num_threads(num_threads)


def rate_in_words(gflop_per_s: float) -> str:
    """`95.2 GFLOP/s`: three significant digits for any rate."""
    rounded = float(f"{gflop_per_s:.3g}")
    decimals = max(0, 2 - math.floor(math.log10(rounded))) if rounded else 0
    return f"{rounded:,.{decimals}f} GFLOP/s"


def _best_rate(dtype: torch.dtype, device: torch.device, budget_s: float) -> float:
    import torch

    deadline = time.perf_counter() + budget_s
    largest = _LARGEST_CPU if device.type == "cpu" else _LARGEST_GPU
    size, best = _FIRST, 0.0
    while True:
        x, w, g = (torch.ones(size, size, device=device).to(dtype) for _ in range(3))
        _seconds(x, w, g)  # the first call of a shape may compile or allocate
        seconds = min(_seconds(x, w, g) for _ in range(_SAMPLES))
        best = max(best, _FLOP * size**3 / seconds / 1e9)
        if size >= largest or time.perf_counter() + _NEXT * seconds > deadline:
            break
        size *= 2
    while time.perf_counter() + seconds <= deadline:  # other programs may have slowed the samples
        seconds = _seconds(x, w, g)
        best = max(best, _FLOP * size**3 / seconds / 1e9)
    return best


def _seconds(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> float:
    import torch

    start = time.perf_counter()
    torch.mm(x, w.t())
    torch.mm(g, w)
    torch.mm(g.t(), x)
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - start
