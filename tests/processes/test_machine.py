"""The memory of this machine, under the limits of control groups; no test allocates any."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from quantexp.processes import machine
from quantexp.processes.machine import group_limits, host_memory_gb


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_limits_of_version_2_are_those_of_the_group_and_its_parents(tmp_path: Path) -> None:
    own = write(tmp_path / "own", "0::/user/job/step\n")
    write(tmp_path / "cgroup/user/job/step/memory.max", "max\n")
    write(tmp_path / "cgroup/user/job/memory.max", "8000000000\n")
    write(tmp_path / "cgroup/user/memory.max", "16000000000\n")
    assert group_limits(own, tmp_path / "cgroup") == [8_000_000_000, 16_000_000_000]


def test_limits_of_version_1_are_those_of_the_memory_controller(tmp_path: Path) -> None:
    own = write(tmp_path / "own", "5:cpu,cpuacct:/a\n4:memory:/a/b\n0::/\n")
    write(tmp_path / "cgroup/memory/a/b/memory.limit_in_bytes", "4000000000\n")
    write(tmp_path / "cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(tmp_path / "cgroup/cpu/a/memory.limit_in_bytes", "1\n")
    assert group_limits(own, tmp_path / "cgroup") == [4_000_000_000, 9223372036854771712]


def test_container_shows_its_own_group_as_the_topmost(tmp_path: Path) -> None:
    own = write(tmp_path / "own", "0::/docker/1a2b3c\n")
    write(tmp_path / "cgroup/memory.max", "2000000000\n")
    assert group_limits(own, tmp_path / "cgroup") == [2_000_000_000]


def test_system_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert group_limits(tmp_path / "missing", tmp_path) == []


def test_machine_has_the_lowest_of_its_memory_and_the_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = psutil.virtual_memory().total
    monkeypatch.setattr(machine, "_OWN_GROUPS", write(tmp_path / "own", "0::/\n"))
    monkeypatch.setattr(machine, "_HIERARCHY", tmp_path)
    assert host_memory_gb() == total / 1e9
    write(tmp_path / "memory.max", f"{total * 2}\n")
    assert host_memory_gb() == total / 1e9
    write(tmp_path / "memory.max", f"{total // 2}\n")
    assert host_memory_gb() == total // 2 / 1e9
