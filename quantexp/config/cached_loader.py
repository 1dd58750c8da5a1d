"""Configuration files read and parsed once for all the compositions of one command.

Hydra reads every file anew for every composition, and copies its store of structured configurations too; in a sweep
that is a third of the time. Here each file is kept as it was read and handed out as a copy, because a composition
changes what it is given; by way of a pickle, which is read in a quarter of the time of a deep copy. What is composed is
the same, and a file that changes while a sweep is composed does not tear it apart.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult

from quantexp.errors import ConfigError

#: Search path and the file's name in it -> the pickle of what was read, or of None where there is no such file.
_Kept = dict[tuple[str, str], bytes]


class ReadOnce(ConfigRepository):
    """A repository whose copies, one for each composition, share what was read."""

    kept: _Kept

    def load_config(self, config_path: str) -> ConfigResult | None:
        """A file's content, the caller's own; None where there is no such file.

        Raises:
            ConfigError: a file that is not UTF-8.
        """
        key = (repr(self.sources), config_path)
        if key not in self.kept:
            try:
                content = super().load_config(config_path)
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{self._file(config_path)} is not UTF-8; save it as UTF-8"
                ) from error
            self.kept[key] = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
        read: ConfigResult | None = pickle.loads(self.kept[key])
        return read

    def _file(self, config_path: str) -> Path:
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        assert source is not None
        return Path(source.path) / source._normalize_file_name(config_path)

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
