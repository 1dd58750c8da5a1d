"""Fixtures that the ledger's tests share with the launchers'."""

from tests.launchers.slurm.conftest import no_slurm as no_slurm
from tests.launchers.slurm.conftest import slurm as slurm
