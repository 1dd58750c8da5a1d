"""The options that the real sbatch understands, whole and abbreviated, against those that quantexp sets itself."""

from __future__ import annotations

import re
import subprocess

import pytest
from quantexp_launchers.slurm.check import _OWN_OPTIONS, check_request

from quantexp.errors import ConfigError
from quantexp.schema import LauncherConfig

#: Set by the command below itself.
_OF_COMMAND = {"test-only", "verbose", "wrap"}
_SET = re.compile(r"^sbatch: (\S+)\s+: ", re.MULTILINE)


@pytest.mark.usefixtures("plain")
def test_no_spelling_of_an_option_of_quantexp_is_accepted() -> None:
    """sbatch says which options a beginning of a name sets; `--tasks` sets `ntasks-per-node`."""
    help_text = subprocess.run(["sbatch", "--help"], capture_output=True, text=True, check=True)
    options = set(re.findall(r"--([a-z][a-z-]+)", help_text.stdout)) | {"tasks-per-node"}
    assert len(options) > 60
    spellings = {name[:length] for name in options for length in range(2, len(name) + 1)}
    refused = 0
    for spelling in sorted(spellings):
        command = ["sbatch", "--verbose", "--test-only", f"--{spelling}=1", "--wrap=true"]
        printed = subprocess.run(command, capture_output=True, text=True, check=False).stderr
        if (set(_SET.findall(printed)) - _OF_COMMAND).isdisjoint(_OWN_OPTIONS):
            continue
        refused += 1
        launcher = LauncherConfig(kind="slurm", sbatch={spelling: "1"})
        with pytest.raises(ConfigError, match=f"sbatch.{spelling} cannot be set: "):
            check_request(launcher)
    assert refused > 100
