"""Fixtures of other folders that verbs are tested with."""

from tests.launchers.slurm.conftest import slurm as slurm
