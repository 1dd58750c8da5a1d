"""The word for a recorded proof."""

from __future__ import annotations

from typing import Any

import pytest

from quantexp.runs.precision import proof_word

ENGAGED, DECLARED = {"status": "engaged"}, {"status": "declared"}


@pytest.mark.parametrize(
    ("record", "word"),
    [
        (None, None),
        ({"entries": [ENGAGED]}, None),
        ({"proved": True, "entries": [ENGAGED]}, "proved"),
        ({"proved": True, "entries": [ENGAGED, DECLARED]}, "declared"),
        ({"proved": False, "entries": [DECLARED]}, "failed"),
    ],
)
def test_a_format_that_cannot_be_proved_is_not_called_proved(
    record: dict[str, Any] | None, word: str | None
) -> None:
    assert proof_word(record) == word
