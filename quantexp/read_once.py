"""Configuration files read and parsed once for all the compositions of one command.

Hydra reads every file anew for every composition, and copies its store of structured configurations too; in a sweep
that is a third of the time. Here each file is kept as it was read and handed out as a copy, because a composition
changes what it is given. What is composed is the same, and a file that changes while a sweep is composed does not tear
it apart.
"""

from __future__ import annotations

import copy
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_loader import ConfigLoader
from hydra.plugins.config_source import ConfigResult

#: Search path and the file's name in it -> what was read; None where there is no such file.
_Kept = dict[tuple[str, str], ConfigResult | None]


class ReadOnce(ConfigRepository):
    """A repository whose copies, one for each composition, share what was read."""

    kept: _Kept

    def load_config(self, config_path: str) -> ConfigResult | None:
        """A file's content, the caller's own; None where there is no such file."""
        key = (repr(self.sources), config_path)
        if key not in self.kept:
            self.kept[key] = super().load_config(config_path)
        return copy.deepcopy(self.kept[key])

    def __deepcopy__(self, memo: dict[int, Any]) -> ReadOnce:
        copied = copy.copy(self)
        copied.sources = list(self.sources)
        return copied


def read_once(loader: ConfigLoader) -> None:
    """Make Hydra's loader read every file once from now on."""
    assert isinstance(loader, ConfigLoaderImpl)
    repository = ReadOnce(loader.get_search_path())
    repository.kept = {}
    loader.repository = repository
