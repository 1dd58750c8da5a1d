"""Caches configuration files, so that one command reads and parses each file once.

Hydra reads every file again for every composition and copies its store of structured configurations, which takes a
third of the time of a sweep. The cache returns a copy, because a composition changes its input; it stores pickles,
which load in a quarter of the time of a deep copy. The composed configurations are the same, and a file that changes
during the composition of a sweep does not make its points inconsistent.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult

from quantexp.config.hydra_internals import ConfigLoaderImpl, ConfigRepository
from quantexp.errors import ConfigError

#: Search path and file name -> the pickle of the file's content, or of None if the file does not exist.
_Cache = dict[tuple[str, str], bytes]


class CachedRepository(ConfigRepository):
    """A repository whose copies, one for each composition, share one cache."""

    cache: _Cache

    def load_config(self, config_path: str) -> ConfigResult | None:
        """A copy of a file's content; None if the file does not exist.

        Raises:
            ConfigError: the file is not UTF-8.
        """
        key = (repr(self.sources), config_path)
        if key not in self.cache:
            try:
                content = super().load_config(config_path)
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{self._file(config_path)} is not UTF-8; save it as UTF-8"
                ) from error
            self.cache[key] = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
        read: ConfigResult | None = pickle.loads(self.cache[key])
        return read

    def _file(self, config_path: str) -> Path:
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        assert source is not None
        return Path(source.path) / source._normalize_file_name(config_path)

    def __deepcopy__(self, memo: dict[int, Any]) -> CachedRepository:
        copied = copy.copy(self)
        copied.sources = list(self.sources)
        return copied


def cache_files(loader: ConfigLoader) -> None:
    """Make Hydra's loader read every file only once from now on."""
    assert isinstance(loader, ConfigLoaderImpl)
    repository = CachedRepository(loader.get_search_path())
    repository.cache = {}
    loader.repository = repository
