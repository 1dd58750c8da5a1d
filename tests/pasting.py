"""What a shell makes of a command that quantexp prints."""

from __future__ import annotations

import os
import subprocess


def words_of(command: str, shell: str = "bash") -> list[str]:
    """The words that the shell itself gets of a pasted line; what is not UTF-8 is as in the name of a file."""
    script = f"printf '%s\\0' {command}"
    pasted = subprocess.run([shell, "-c", script], stdout=subprocess.PIPE, check=True)
    return list(map(os.fsdecode, pasted.stdout.split(b"\0")[:-1]))
