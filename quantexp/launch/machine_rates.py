"""The measured rates of a machine, kept in the cache: they are measured once, and equal plans have equal times.

`quantexp doctor` measures again, for instance after other programs occupied the machine during the first measurement. A
machine is another one if its name, processor, cores, threads, GPU, or version of torch differ.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from quantexp.errors import UnreadableError
from quantexp.launch.product_rate import product_gflop_per_s
from quantexp.processes.cores import allowed_cores
from quantexp.reading.json_files import read_json
from quantexp.reading.typed import Rule
from quantexp.runs.device import LIMITS
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
