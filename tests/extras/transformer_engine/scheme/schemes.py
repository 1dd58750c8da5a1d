"""Shipped schemes with overrides, without Hydra, which takes longer than all that is tested here."""

from __future__ import annotations

import shlex
from typing import Any

from omegaconf import OmegaConf

from quantexp.config.formats import fill_formats
from quantexp.folders import conf_dir
from quantexp.schema import QuantConfig


def scheme(words: str) -> QuantConfig:
    """`NAME key=value ...`: the scheme of conf/quant/NAME.yaml with keys of the section quant changed."""
    name, *overrides = shlex.split(words)
    file: Any = OmegaConf.load(conf_dir() / "quant" / f"{name}.yaml")
    config: Any = OmegaConf.structured(QuantConfig)
    for entry in file.pop("defaults"):
        for key, choice in entry.items() if entry != "_self_" else ():
            site = key.rpartition("@")[2]
            chosen = OmegaConf.load(conf_dir() / "quant" / site / f"{choice}.yaml")
            config[site] = OmegaConf.merge(config[site], chosen)
    changes = OmegaConf.from_dotlist(overrides)
    quant = OmegaConf.to_object(OmegaConf.merge(config, file, changes))
    assert isinstance(quant, QuantConfig)
    fill_formats(quant, [], [])
    return quant
