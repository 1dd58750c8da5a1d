"""Overrides in commands to paste."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from quantexp.config.overrides import readable
from quantexp.folders import override_word
from tests.pasting import words_of


@pytest.mark.parametrize(
    "path",
    [
        "/data/wiki",
        "/my data/wiki",
        "/it's/wiki",
        '/the "big" one',
        "/a, b",
        "/runs [1]/x",
        "/{a}(b)",
        "back\\slash",
        "ends with \\",
        "~/wiki",
        "$HOME/`x`!&;*?#%",
        "key=value@9",
        "été",
        " ",
        "",
        "1e3",
        "new\nline",
        "tab\tand\u200b",
        "it's\n[1], \\",
    ],
)
def test_the_word_means_the_text_to_the_shell_and_to_hydra(path: str) -> None:
    command = override_word("dataset.path", path)
    assert command.isprintable()
    (word,) = words_of(command)
    (override,) = readable([word])
    assert OverridesParser.create().parse_override(override).value() == path


def test_an_ordinary_path_needs_no_quotes() -> None:
    assert override_word("dataset.path", "/data/wiki-2") == "dataset.path=/data/wiki-2"
