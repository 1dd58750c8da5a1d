"""Fixtures of other folders for the tests of the verbs."""

from tests.launchers.slurm.conftest import slurm as slurm
