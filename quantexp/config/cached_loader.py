"""Caches configuration files, so that a command reads and parses each file once, and refuses those that take too long.

Hydra reads every file again for every composition and copies its store of structured configurations, which takes a
third of the time of a sweep. The cache returns a copy, because a composition changes its input; it stores pickles,
which load in a quarter of the time of a deep copy. The composed configurations are the same, and a file that changes
during the composition of a sweep does not make its points inconsistent.

`check_yaml` refuses files that cannot be read in bounded time, memory and depth, or that YAML reads otherwise than
written. Parsing to events takes time in proportion to the file and builds nothing. The checks count what building would
take: the depth, and the nodes with every alias in place of its anchor, which may be billions in a file of ten lines.
"""

from __future__ import annotations

import copy
import pickle
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

from quantexp.config.choices import groups
from quantexp.config.hydra_internals import ConfigLoaderImpl, ConfigRepository
from quantexp.config.load import check_lists
from quantexp.config.values import check_values
from quantexp.config.words import DEEPEST, LONGEST_KEY, MOST_DIGITS
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
                plain, section = (
                    OmegaConf.to_container(content.config),
                    _package(config_path, content),
                )
                check_values(plain, section)
                check_lists(plain, section)
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


#: The most bytes of a file, and nodes with aliases expanded.
LARGEST_FILE, MOST_NODES = 1_000_000, 100_000
#: A plain scalar that YAML 1.1 reads as an integer of another base: 010 is 8, and 1:30 is 90.
_OTHER_BASE = re.compile(r"[-+]?(?:0[0-7_]+|0[xb][0-9a-f_]+|[1-9][0-9_]*(?::[0-5]?\d)+)", re.I)
_DIGITS = re.compile(rf"[-+]?\d(?:_?\d){{{MOST_DIGITS},}}")
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def check_yaml(file: Path) -> None:
    """Refuse a file that is not a regular file, too large, not UTF-8, nested too deep, or ambiguous.

    Raises:
        ConfigError: names the file, and the line where there is one.
        OSError: it cannot be read.
    """
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{file} must be a regular file")
    if status.st_size > LARGEST_FILE:
        raise ConfigError(
            f"{file} must have at most {LARGEST_FILE:,} bytes, got {status.st_size:,}"
        )
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8; save it as UTF-8") from error
    try:
        _check_events(file, yaml.parse(text, Loader=_Loader))
    except yaml.YAMLError as error:
        where = " ".join(str(error).replace('"<unicode string>"', f'"{file}"').split())
        raise ConfigError(f"{file} cannot be read: {where}; mend the YAML") from error


def _check_events(file: Path, events: Iterator[yaml.Event]) -> None:
    """Count nodes and depth, of an alias those of its anchor."""
    sizes: dict[str | None, int] = {}
    #: The open collections: anchor, and nodes so far.
    opened: list[tuple[str | None, int]] = []
    for event in events:
        line = 1 if event.start_mark is None else event.start_mark.line + 1
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, 1))
            if len(opened) > DEEPEST:
                raise ConfigError(f"{file}, line {line}: it must be nested at most {DEEPEST} deep")
            continue
        if isinstance(event, yaml.ScalarEvent):
            _check_scalar(f"{file}, line {line}", event)
            anchor, size = event.anchor, 1
        elif isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in opened):
                raise ConfigError(f"{file}, line {line}: *{event.anchor} contains itself")
            anchor, size = None, sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = opened.pop()
        else:
            continue
        if anchor is not None:
            sizes[anchor] = size
        if size > MOST_NODES:
            raise ConfigError(
                f"{file}, line {line}: it must have at most {MOST_NODES:,} values, aliases counted as what they stand "
                f"for, got {size:,}"
            )
        if opened:
            opened[-1] = (opened[-1][0], opened[-1][1] + size)


def _check_scalar(where: str, event: yaml.ScalarEvent) -> None:
    if len(event.value) > LONGEST_KEY and _DIGITS.fullmatch(event.value):
        raise ConfigError(f"{where}: a number must have at most {MOST_DIGITS} digits")
    if event.implicit[0] and event.tag is None and _OTHER_BASE.fullmatch(event.value):
        number = yaml.safe_load(event.value)
        raise ConfigError(
            f"{where}: {event.value} is the number {number} in YAML; write {number}, or '{event.value}' for the text"
        )
