"""Where a run came from, and what verified its numerics: provenance.json as a table."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantexp.analysis.compare.leaves import leaves

#: Characters of uncommitted changes that are shown.
MAX_DIFF = 20_000


@dataclass(frozen=True)
class Origin:
    """Provenance as rows, the uncommitted changes, and the certificate."""

    rows: tuple[tuple[str, str], ...] = ()
    diff: str = ""
    diff_cut: bool = False
    #: The command as it can be typed again.
    command: str = ""
    #: State and words of `verified`.
    verified_state: str = "not verified"
    verified: str = "provenance.json says nothing about a verification"
    certificate: Mapping[str, Any] | None = None

    @property
    def reason(self) -> str:
        """What follows the state in a sentence: its words, without the state where they begin with it."""
        begins = self.verified.startswith(self.verified_state)
        return self.verified.removeprefix(self.verified_state) if begins else f": {self.verified}"


def origin(provenance: Mapping[str, Any] | None) -> Origin:
    """What the report shows of provenance.json; the scheme in the identity is the precision map, shown elsewhere."""
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
