"""The schemes of a run: one for all modules, or one for each as `--te-precision-config-file` says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantexp.errors import ConfigError
from quantexp.extras.megatron_lm.described import QUANT, experiment_of
from quantexp.quant.precision import ModuleId, PrecisionMap, precision_map
from quantexp.quant.records import entry_record
from quantexp.quant.rules import changes
from quantexp.schema import Experiment, ModelConfig, QuantConfig

#: The key of a configuration in the file.
KEY = "quantexp"


class Schemes:
    """The precision map of the whole model, by iteration."""

    def __init__(
        self,
        model: ModelConfig,
        quant: QuantConfig,
        of_module: Mapping[ModuleId, QuantConfig] | None = None,
    ) -> None:
        """`of_module` has the modules whose scheme is not `quant`."""
        self.model, self.quant = model, quant
        self.of_module = dict(of_module or {})

    @property
    def all(self) -> list[QuantConfig]:
        """Every scheme once."""
        return list({id(each): each for each in (self.quant, *self.of_module.values())}.values())

    @property
    def changes(self) -> list[int]:
        """The iterations at which the map changes, and the first."""
        return sorted({iteration for quant in self.all for iteration in changes(quant)})

    def declared(self, iteration: int) -> PrecisionMap:
        """The map of an iteration, from 1."""
        maps = {id(quant): precision_map(self.model, quant, iteration) for quant in self.all}
        whole = maps[id(self.quant)]
        return {name: maps[id(self.of_module.get(name, self.quant))][name] for name in whole}

    def record(self, last: int) -> list[Any]:
        """The maps up to an iteration, as a run's identity has them."""
        return [
            [
                iteration,
                [entry_record(e) for m in self.declared(iteration).values() for e in m.entries()],
            ]
            for iteration in self.changes
            if iteration <= last
        ]


def schemes_of_file(
    experiment: Experiment, args: Any, entries: Mapping[ModuleId, Mapping[str, Any]]
) -> Schemes:
    """The run's scheme, and for each module with an entry in the per-module file the scheme that this names.

    Raises:
        ConfigError: an entry is not quantexp's, or a scheme is unknown.
    """
    composed: dict[str, QuantConfig] = {}
    for name, entry in entries.items():
        if list(entry) != [KEY] or not isinstance(entry[KEY], str):
            raise ConfigError(
                f"--te-precision-config-file: the configuration of {name} must be {{{KEY}: SCHEME}}, got {dict(entry)}"
            )
        if (scheme := entry[KEY]) not in composed:
            composed[scheme] = experiment_of(args, {QUANT: scheme}).quant
    of_module = {name: composed[str(entry[KEY])] for name, entry in entries.items()}
    return Schemes(experiment.model, experiment.quant, of_module)
