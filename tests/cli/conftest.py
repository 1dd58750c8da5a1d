"""Fixtures of other folders that verbs are tested with."""

from tests.launch.ledger.conftest import slurm as slurm
