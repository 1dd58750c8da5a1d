"""Without a cluster the tests here are skipped with a message; where CI requires a cluster they fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .cluster import KINDS, find

ONE_TEST = "tests/slurm/test_cluster.py::test_a_constraint_chooses_the_node_that_has_the_feature"
NOT_RUNNING = "no SLURM test cluster is running; start it with tests/slurm/setup.sh"


def pytest_without_cluster(folder: Path, require: str) -> subprocess.CompletedProcess[str]:
    """Run one test of each kind of cluster, without a cluster."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", ONE_TEST],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "QUANTEXP_SLURM_DIR": str(folder), "QUANTEXP_REQUIRE_SLURM": require},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_without_a_cluster_the_summary_counts_the_skipped_tests_and_names_the_remedy(
    tmp_path: Path,
) -> None:
    process = pytest_without_cluster(tmp_path, require="0")
    assert process.returncode == 0, process.stdout
    assert "2 skipped" in process.stdout
    assert NOT_RUNNING in process.stdout
    left_out = "not run: 2 tests against a real SLURM (start one with tests/slurm/setup.sh)"
    assert process.stdout.splitlines()[-2] == left_out  # all that follows is pytest's count


def test_where_a_cluster_is_required_a_skip_is_a_failure(tmp_path: Path) -> None:
    process = pytest_without_cluster(tmp_path, require="1")
    assert process.returncode == 1, process.stdout
    assert "2 errors" in process.stdout
    assert NOT_RUNNING in process.stdout
    assert "not run:" not in process.stdout


def test_a_cluster_that_was_stopped_counts_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in KINDS:
        (tmp_path / kind).mkdir()
        conf = f"ClusterName={kind}\nSlurmctldHost=localhost\nSlurmctldPort=1\nNodeName=n1\nPartitionName=lo Nodes=n1\n"
        (tmp_path / kind / "slurm.conf").write_text(conf)
    monkeypatch.setenv("QUANTEXP_SLURM_DIR", str(tmp_path))
    assert [find(kind) for kind in KINDS] == [None, None]
