"""A tokenizer of whole words, with any template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.task_files import WORDS

VOCAB = ["<bos>", "<eos>", ".", "?", "the", "of", *WORDS]


def write_tokenizer(folder: Path, before: str, after: str, config: Mapping[str, Any]) -> Path:
    """Write tokenizer.json and tokenizer_config.json; returns the folder.

    Args:
        folder: is there.
        before: the token that the template puts before a text; empty means none.
        after: the token that it puts after one.
        config: what tokenizer_config.json has besides `eos_token`.
    """
    names = {name: i for i, name in enumerate(VOCAB)}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}

    def special(token: str) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": token, "type_id": 0}}] if token else []

    used = {token for token in (before, after) if token}
    template = {
        "type": "TemplateProcessing",
        "single": [*special(before), {"Sequence": {"id": "A", "type_id": 0}}, *special(after)],
        "pair": [{"Sequence": {"id": each, "type_id": 0}} for each in "AB"],
        "special_tokens": {
            token: {"id": token, "ids": [names[token]], "tokens": [token]} for token in used
        },
    }
    content = {
        "version": "1.0",
        "pre_tokenizer": {"type": "Whitespace"},
        "added_tokens": [
            {"id": names[name], "content": name, "special": True} | flags
            for name in ("<bos>", "<eos>")
        ],
        "normalizer": None,
        "post_processor": template if used else None,
        "model": {"type": "WordLevel", "vocab": names, "unk_token": "?"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", **config}))
    return folder
