"""Runs SLURM's clients with a time limit.

Without munge or a controller the clients hang for minutes. Environment variables that change their output are removed,
and times are printed as seconds since 1970, so that time zones do not matter.
"""

from __future__ import annotations

import os
import subprocess

from quantexp.errors import RunError

#: Time limit of a client, seconds. SLURM itself gives up on a controller that is down after some 10 s.
CLIENT_S = 30.0
#: Prefixes of variables that set default options: columns, filters.
_DEFAULTS = ("SQUEUE_", "SACCT_", "SCANCEL_")


class ClientError(RunError):
    """A client failed; `last_line` is the end of its stderr, `missing` is true if it is not on PATH."""

    def __init__(
        self, message: str, client: str, last_line: str = "", *, missing: bool = False
    ) -> None:
        super().__init__(message)
        self.client = client
        self.last_line = last_line
        self.missing = missing


def run_client(command: list[str]) -> str:
    """Run a client and return its standard output.

    Raises:
        ClientError: the client is not on PATH, timed out, or failed; with the last line of its stderr.
    """
    client = command[0]
    try:
        completed = subprocess.run(
            command,
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
            client,
            missing=True,
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ClientError(
            f"the SLURM controller does not answer: {client} was given up after {CLIENT_S:.0f} s; see `scontrol ping` "
            "and whether munge runs, and try again",
            client,
        ) from error
    if completed.returncode:
        last_line = (completed.stderr.strip().splitlines() or ["no message"])[-1]
        raise ClientError(
            f"{client} failed (exit code {completed.returncode}): {last_line}; see `scontrol ping`, and try again",
            client,
            last_line,
        )
    return completed.stdout


def _environment() -> dict[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(_DEFAULTS)
    }
    return {**inherited, "SLURM_TIME_FORMAT": "%s"}
