"""Several processes of one test, with gloo on the loopback interface."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.multiprocessing.spawn import spawn

_TIMEOUT = timedelta(seconds=120)


def in_processes(
    work: Callable[..., Any], num_processes: int, folder: Path, *args: Any
) -> list[Any]:
    """What `work(rank, *args)` returns in each of these processes, by rank; it must be importable and picklable.

    Raises:
        ProcessRaisedException: the first error of a process, which ends all of them.
    """
    arguments = (work, num_processes, folder, args)
    spawn(_run, arguments, nprocs=num_processes)
    results = [folder / f"{rank}.pt" for rank in range(num_processes)]
    return [torch.load(result, weights_only=False) for result in results]


def _run(
    rank: int, work: Callable[..., Any], num: int, folder: Path, args: tuple[Any, ...]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=num,
        timeout=_TIMEOUT,
    )
    try:
        torch.save(work(rank, *args), folder / f"{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()
