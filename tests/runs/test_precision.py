"""The word for a recorded proof."""

from __future__ import annotations

from typing import Any

import pytest

from quantexp.runs.precision import proof_word


@pytest.mark.parametrize(
    ("record", "word"),
    [
        (None, None),
        ({"entries": []}, None),
        ({"proved": True, "entries": []}, "proved"),
        ({"proved": False, "entries": []}, "failed"),
    ],
)
def test_a_record_without_a_proof_has_no_word(
    record: dict[str, Any] | None, word: str | None
) -> None:
    assert proof_word(record) == word
