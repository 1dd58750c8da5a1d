"""The origin of a run and the verification of its numerics: provenance.json as a table."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantexp.analysis.compare.leaves import leaves

#: Maximum shown characters of uncommitted changes.
MAX_DIFF = 20_000


@dataclass(frozen=True)
class Origin:
    """Provenance as rows, with the uncommitted changes and the certificate."""

    rows: tuple[tuple[str, str], ...] = ()
    diff: str = ""
    diff_cut: bool = False
    #: The command, quoted for a shell.
    command: str = ""
    #: State and words of `verified`.
    verified_state: str = "not verified"
    verified: str = "provenance.json says nothing about a verification"
    certificate: Mapping[str, Any] | None = None

    @property
    def reason(self) -> str:
        """The text after the state in a sentence, without a leading repetition of the state."""
        begins = self.verified.startswith(self.verified_state)
        return self.verified.removeprefix(self.verified_state) if begins else f": {self.verified}"


def origin(provenance: Mapping[str, Any] | None) -> Origin:
    """The shown part of provenance.json, without the scheme of the identity, which the precision map shows."""
    if provenance is None:
        return Origin()
    command = provenance.get("command")
    source = provenance.get("source")
    diff = str(source.get("diff") or "") if isinstance(source, dict) else ""
    verified = provenance.get("verified")
    known = verified if isinstance(verified, dict) else {}
    certificate = known.get("certificate")
    return Origin(
        tuple(_rows(provenance)),
        diff[:MAX_DIFF],
        len(diff) > MAX_DIFF,
        shlex.join(map(str, command)) if isinstance(command, list) else str(command or ""),
        str(known.get("state") or Origin.verified_state),
        str(known.get("words") or Origin.verified),
        certificate if isinstance(certificate, dict) else None,
    )


def _rows(provenance: Mapping[str, Any]) -> list[tuple[str, str]]:
    shown = {key: value for key, value in provenance.items() if key not in ("verified", "command")}
    for section, key in (("identity", "scheme"), ("source", "diff")):
        part = shown.get(section)
        if isinstance(part, dict):
            shown[section] = {k: v for k, v in part.items() if k != key}
    return [(key, _text(value)) for key, value in leaves(shown).items()]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
