"""All that quantexp takes from Hydra's private modules: the loader of configuration files, and a sweep's expansion."""

from __future__ import annotations

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

__all__ = ["BasicSweeper", "ConfigLoaderImpl", "ConfigRepository"]
