"""The processor cores and the memory that this process may use.

Memory is the installed memory, or the limit of a control group: containers and schedulers limit it by these. The lowest
limit between this process's group and the root of the hierarchy counts, for version 1 (`memory.limit_in_bytes`) and
version 2 (`memory.max`). Swap does not count, because a training that swaps never finishes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

#: The list of a process's control groups, and the mount point of their hierarchy.
_OWN_GROUPS, _HIERARCHY = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def host_memory_gb() -> float:
    """The memory that all processes of this machine may use together, in units of 1e9 bytes."""
    limits = group_limits(_OWN_GROUPS, _HIERARCHY)
    return min([psutil.virtual_memory().total, *limits]) / 1e9


def group_limits(own_groups: Path, hierarchy: Path) -> list[int]:
    """The memory limits of a process's control groups and of all groups above them, in bytes.

    Args:
        own_groups: lines of the form `4:memory:/a/b`, or `0::/a/b` for version 2.
        hierarchy: the mount point of the groups. A container mounts only a part of them: missing groups are skipped,
            and the topmost folder is the container's own group.
    """
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:  # not Linux
        return []
    return [limit for line in lines for file in _files(line, hierarchy) for limit in _limit(file)]


def _files(line: str, hierarchy: Path) -> Iterator[Path]:
    """The files that may hold a limit, for the group in a line and all groups above it."""
    _, controllers, path = line.split(":", 2)
    tops: tuple[Path, ...]
    if controllers == "":
        tops, name = (hierarchy, hierarchy / "unified"), "memory.max"
    elif "memory" in controllers.split(","):
        tops, name = (hierarchy / "memory",), "memory.limit_in_bytes"
    else:
        return
    group = Path(path.lstrip("/"))
    for top in tops:
        for folder in (group, *group.parents):
            yield top / folder / name


def _limit(file: Path) -> list[int]:
    """The limit in a file; empty if the file does not exist or holds `max`."""
    try:
        text = file.read_text().strip()
    except OSError:
        return []
    return [int(text)] if text.isdecimal() else []


#: The number of cores that a cluster gave a job, whose processes may be allowed to run on all cores of the node.
CORES = "QUANTEXP_CORES"


def num_cores() -> int:
    """The number of processes that may work in parallel: one for each core of this process or, in a job, of the job."""
    return int(os.environ.get(CORES) or len(allowed_cores()))


def allowed_cores() -> list[int]:
    """The cores that this process may use, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def ranges(numbers: Sequence[int]) -> str:
    """`0-3,8` for 0, 1, 2, 3, 8."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in spans)
