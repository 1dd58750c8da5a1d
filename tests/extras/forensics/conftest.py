"""Fixtures of other folders."""

from tests.analysis.report.conftest import runs as runs
from tests.launchers.slurm.conftest import slurm as slurm
