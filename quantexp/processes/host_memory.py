"""The memory that this machine gives to its processes: what is built in, or less where a control group limits it.

Containers and schedulers limit memory by control groups. The limit that counts is the lowest on the way from this
process's own group to the root of the hierarchy, in version 1 (`memory.limit_in_bytes`) and version 2 (`memory.max`)
alike. Swap is not counted: a training that swaps does not come to an end.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

#: Where the kernel says which control groups a process is in, and shows them.
_OWN_GROUPS, _HIERARCHY = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def host_memory_gb() -> float:
    """Memory that the processes of this machine may take together, in units of 1e9 bytes."""
    limits = group_limits(_OWN_GROUPS, _HIERARCHY)
    return min([psutil.virtual_memory().total, *limits]) / 1e9


def group_limits(own_groups: Path, hierarchy: Path) -> list[int]:
    """The memory limits of a process's control groups and of all groups above them, in bytes.

    Args:
        own_groups: lines of the form `4:memory:/a/b`, or `0::/a/b` for version 2.
        hierarchy: the folder in which the groups are mounted. In a container only a part of them is: a group that is
            not there is passed over, and the topmost folder is the container's own group.
    """
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:  # not Linux
        return []
    return [limit for line in lines for file in _files(line, hierarchy) for limit in _limit(file)]


def _files(line: str, hierarchy: Path) -> Iterator[Path]:
    """The files that may hold a limit, of the group that a line names and of those above it."""
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
    """The limit in a file; nothing where it is not there or holds `max`."""
    try:
        text = file.read_text().strip()
    except OSError:
        return []
    return [int(text)] if text.isdecimal() else []
