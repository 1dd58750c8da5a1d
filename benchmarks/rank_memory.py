"""Peak memory of each rank of a run in a layout, beside what `quantexp plan` says of its fullest rank.

The run is the public command; its ranks are watched from outside. Linux counts the peak resident set of each process
itself (`VmHWM`), so no moment is missed between two looks. A rank's own part is that less the resident set of a process
that has imported what a rank imports, and in which torch has multiplied once.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_WORKER = "quantexp.training.worker"
_BASELINE = f"""
import torch, quantexp.training.megatron.data_loader, quantexp.training.megatron.trainer, {_WORKER}
torch.randn(64, 64) @ torch.randn(64, 64)
print(open("/proc/self/status").read())
"""
_LOOK_S = 0.05


def rank_peaks(words: list[str], num_ranks: int) -> dict[int, float]:
    """The peak of each rank beyond its imports, in units of 1e9 bytes.

    Raises:
        RuntimeError: the run failed, or a rank was never seen.
    """
    baseline = _baseline()
    with tempfile.TemporaryDirectory() as root, (Path(root) / "log").open("w+b") as log:
        command = [sys.executable, "-W", "ignore", "-m", "quantexp", f"paths.root={root}", *words]
        run = subprocess.Popen(command, stdout=log, stderr=log)
        peaks = _watched(run, num_ranks)
        if run.returncode or len(peaks) < num_ranks:
            raise RuntimeError(f"ranks {sorted(peaks)}: {(Path(root) / 'log').read_text()[-2000:]}")
    return {rank: (peak - baseline) / 1e9 for rank, peak in sorted(peaks.items())}


def _baseline() -> int:
    command = [sys.executable, "-W", "ignore", "-c", _BASELINE]
    return _bytes(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout, "VmRSS")


def _watched(run: subprocess.Popen[bytes], num_ranks: int) -> dict[int, int]:
    """The peak resident set of each rank of a run, in bytes, at its end."""
    ranks: dict[Path, int] = {}
    peaks: dict[int, int] = {}
    while run.poll() is None:
        if len(ranks) < num_ranks:
            ranks |= _new_ranks(run.pid, ranks)
        for process, rank in ranks.items():
            with contextlib.suppress(OSError, ValueError):  # it has ended
                peaks[rank] = _bytes((process / "status").read_bytes(), "VmHWM")
        time.sleep(_LOOK_S)
    return peaks


def _new_ranks(pid: int, known: dict[Path, int]) -> dict[Path, int]:
    """The workers among a process's descendants that are not yet known, with their ranks."""
    import psutil

    ranks = {}
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            process = Path(f"/proc/{child.pid}")
            if process in known:
                continue
            with contextlib.suppress(psutil.Error):
                words, environment = child.cmdline(), child.environ()
                if _WORKER in words and "RANK" in environment:
                    ranks[process] = int(environment["RANK"])
    return ranks


def _bytes(status: bytes, field: str) -> int:
    """A field of /proc/PID/status.

    Raises:
        ValueError: the process has no memory any more.
    """
    match = re.search(rf"^{field}:\s+(\d+) kB$".encode(), status, re.MULTILINE)
    if match is None:
        raise ValueError(f"no {field}")
    return int(match[1]) * 1024
