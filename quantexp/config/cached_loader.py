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
from omegaconf import DictConfig, OmegaConf

from quantexp.config.choices import groups
from quantexp.config.hydra_internals import ConfigLoaderImpl, ConfigRepository
from quantexp.config.values import check_values
from quantexp.config.yaml_files import check_yaml
from quantexp.errors import ConfigError

#: Search path and file name -> the pickle of the file's content, or of None if the file does not exist.
_Cache = dict[tuple[str, str], bytes]


class CachedRepository(ConfigRepository):
    """A repository whose copies, one for each composition, share one cache."""

    cache: _Cache

    def load_config(self, config_path: str) -> ConfigResult | None:
        """A copy of a file's content; None if the file does not exist.

        Raises:
            ConfigError: the file cannot be read, or is not a configuration.
        """
        key = (repr(self.sources), config_path)
        if key not in self.cache:
            try:
                content = self._checked(config_path)
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else error
                raise ConfigError(f"{self._file(config_path)} cannot be read: {reason}") from error
            self.cache[key] = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
        read: ConfigResult | None = pickle.loads(self.cache[key])
        return read

    def _checked(self, config_path: str) -> ConfigResult | None:
        file = self._file(config_path)
        if file is not None:
            check_yaml(file)
        content = super().load_config(config_path)
        if file is not None and content is not None and isinstance(content.config, DictConfig):
            try:
                check_values(OmegaConf.to_container(content.config), _package(config_path, content))
            except ConfigError as error:
                raise ConfigError(f"{file}: {error}") from error
        return content

    def _file(self, config_path: str) -> Path | None:
        """The file of a configuration; None for one of a package or of the store, and for one that does not exist."""
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is None or source.scheme() != "file":
            return None
        return Path(source.path) / source._normalize_file_name(config_path)

    def __deepcopy__(self, memo: dict[int, Any]) -> CachedRepository:
        copied = copy.copy(self)
        copied.sources = list(self.sources)
        return copied


def _package(config_path: str, content: ConfigResult) -> str:
    """The section that a file fills: its `@package`, or its group."""
    package = content.header.get("package")
    if package is not None:
        return "" if package == "_global_" else package
    holding = [group for group in groups() if config_path.startswith(f"{group}/")]
    return max(holding, key=len, default="").replace("/", ".")


def cache_files(loader: ConfigLoader) -> None:
    """Make Hydra's loader read every file only once from now on."""
    assert isinstance(loader, ConfigLoaderImpl)
    repository = CachedRepository(loader.get_search_path())
    repository.cache = {}
    loader.repository = repository
