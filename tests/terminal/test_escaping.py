"""Hidden characters as their codes."""

from __future__ import annotations

from quantexp.terminal.escaping import printable, printable_content, printable_line


def test_hidden_characters_are_shown_by_their_codes() -> None:
    assert printable("a\x1b[2Jb\x07\r\x9b\u202e\u200b\ud800\U000e0041\x7f") == (
        "a\\x1b[2Jb\\x07\\r\\x9b\\u202e\\u200b\\ud800\\U000e0041\\x7f"
    )


def test_visible_characters_stay() -> None:
    text = "häuser 数 🙂 -> x\u00a0y\u3000z \\n [red]"
    assert printable(text) == printable_line(text) == text


def test_line_feeds_and_tabs_stay_unless_it_is_one_line() -> None:
    assert printable("a\tb\n\x0b") == "a\tb\n\\x0b"
    assert printable_line("a\tb\n") == "a\\tb\\n"


def test_content_is_shown_at_every_depth() -> None:
    content = {"\x1b": ["\u202e", {"a": ("\r", 1, None, 2.5)}]}
    assert printable_content(content) == {"\\x1b": ["\\u202e", {"a": ["\\r", 1, None, 2.5]}]}
