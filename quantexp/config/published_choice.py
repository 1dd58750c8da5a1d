"""`model.from_hf`: turns the model of a published configuration into a Hydra choice.

The numbers of a config.json become a file of the group `model` in Hydra's store, and the overrides choose that file. A
model file of the user may name the config.json; its other keys override the published numbers. Set anywhere else (an
override, an experiment), `from_hf` replaces the chosen model as a whole.
"""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from quantexp.config.overrides import FROM_HF, key_of
from quantexp.errors import ConfigError
from quantexp.folders import conf_dir, user_path
from quantexp.model.checkpoint_hashes import require_intact
from quantexp.model.huggingface.configuration import numbers, read_config


def with_published_choice(words: list[str], config: DictConfig) -> list[str]:
    """The overrides with the published model as the chosen one.

    Args:
        words: all overrides.
        config: the composition of `words_to_choose_by(words)`, which has `model.from_hf`.

    Raises:
        ConfigError: the published configuration cannot be read, or another model is chosen too.
        DataError: it is that of a checkpoint, and damaged.
    """
    path = user_path(str(config.model.from_hf))
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        require_intact(file, only=(file.name,))
    choice = _stored(file, _file_keys(config, words))
    return [*(word for word in words if key_of(word) != "model"), f"model={choice}"]


def _file_keys(config: DictConfig, words: list[str]) -> dict[str, Any]:
    """The other keys of the model file that names the published configuration; empty if no file names it."""
    name = f"model/{config.hydra.runtime.choices.get('model')}.yaml"
    folders = [Path(urlsplit(str(folder)).path) for folder in config.hydra.searchpath]
    files = (folder / name for folder in [*folders, conf_dir()])
    file = next((file for file in files if file.is_file()), None)
    own = yaml.safe_load(file.read_text(encoding="utf-8")) if file is not None else None
    if own and own.get("from_hf") is not None:
        return {key: value for key, value in own.items() if key != "defaults"}
    for word in words:
        if key_of(word) == "model":
            raise ConfigError(
                f"{word} and {FROM_HF}={config.model.from_hf} both choose the model; drop one of them"
            )
    return {}


def _stored(file: Path, overriding: dict[str, Any]) -> str:
    """Store a published model, with the other keys of its file, as a choice; returns the choice's name."""
    folder = re.sub(r"[^A-Za-z0-9._+~-]", "-", file.absolute().parent.name).lstrip("._+~-")
    node = {"name": folder or "from_hf", **numbers(read_config(file), file), **overriding}
    choice = f"from_hf_{sha256(repr(node).encode()).hexdigest()[:16]}"
    ConfigStore.instance().store(group="model", name=choice, node=node)
    return choice
