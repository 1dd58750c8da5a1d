"""SLURM's own clients, each called as a list of words and with a time limit.

Without munge or a controller they hang for minutes. Variables that would change what they print are taken
away, and times come as seconds since 1970, so that no time zone matters.
"""

from __future__ import annotations

import os
import shutil
import subprocess

from quantexp.errors import RunError

#: Seconds that a client may take. A controller that is down is given up by SLURM itself after some 10 s.
CLIENT_S = 30.0
#: Variables with these beginnings are defaults of options: columns, filters.
_DEFAULTS = ("SQUEUE_", "SACCT_", "SCANCEL_")


class ClientError(RunError):
    """A client that could not answer; `said` is its own last line, `missing` that it is not on PATH."""

    def __init__(self, message: str, said: str = "", *, missing: bool = False) -> None:
        super().__init__(message)
        self.said = said
        self.missing = missing


def has_slurm() -> bool:
    """Whether SLURM's clients are on PATH."""
    return shutil.which("squeue") is not None


def ask(words: list[str]) -> str:
    """What a client prints.

    Raises:
        ClientError: it is not on PATH, did not answer in time, or failed; with its own last line.
    """
    client = words[0]
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=CLIENT_S,
            env=_environment(),
            check=False,
        )
    except FileNotFoundError as error:
        raise ClientError(
            f"no SLURM here: {client} is not on PATH; go to a machine of the cluster, or add SLURM's folder to PATH",
            missing=True,
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ClientError(
            f"the SLURM controller does not answer: {client} was given up after {CLIENT_S:.0f} s; see `scontrol ping` "
            "and whether munge runs, and try again"
        ) from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ClientError(
            f"{client} failed (exit code {done.returncode}): {said}; see `scontrol ping`, and try again",
            said,
        )
    return done.stdout


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_DEFAULTS)}
    return {**kept, "SLURM_TIME_FORMAT": "%s"}
