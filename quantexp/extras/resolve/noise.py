"""The control `noise`: a scheme whose rounding errors have random signs, and nothing else of it changed.

Where a slot rounds x to Q(x), the control multiplies

    x + s (Q(x) - x),    s = 1 or -1, drawn for each element, product, step and micro-batch

Every error keeps its size, and its mean is zero whatever x is: unbiased noise of exactly the scheme's relative size.
The sum rounds once more to the working precision, far finer than the format. What a scheme does to the loss beyond this
control comes from the direction of its errors, not from their size.

The values lie on no grid, so a slot's format is a Python class (`docs/own_format.md`), which the proof checks as any
other; its file is written into the design's folder. A scheme is refused if a slot's values are more than a rounding of
one tensor: a transform, parts, delayed scales, a copy that is quantised again, random rounding.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import sys
from collections.abc import Iterable
from dataclasses import replace
from enum import Enum
from pathlib import Path

from quantexp.errors import ConfigError
from quantexp.formats.definitions.python import python_definition
from quantexp.formats.spec import QuantSpec, resolve
from quantexp.formats.types import Scaling
from quantexp.model.decoder import EMBEDDING
from quantexp.quant.outside_products import state_slots
from quantexp.quant.precision import Entry, precision_map
from quantexp.quant.rules import changes
from quantexp.quant.units import key_of
from quantexp.runs.disk import write_whole
from quantexp.schema import Aspect, Backend, ModelConfig, QuantConfig, Rule

#: Options of `quantise` that a slot's values depend on.
_OPTIONS = ("block", "scale_rule", "rounding", "saturate", "scaling", "amax_target", "pre_scale")
_FILE = """\
\"\"\"Rounding errors with random signs, written by `quantexp branch --control noise`.\"\"\"

from quantexp.extras.resolve.mirrored import Mirrored

"""


def noisy(quant: QuantConfig, model: ModelConfig, iteration: int, folder: Path) -> QuantConfig:
    """The scheme with noise in place of its rounding; the classes of its formats are written into `folder`.

    Raises:
        ConfigError: the scheme does more than rounding.
    """
    name = str(quant.name)
    is_one_map = changes(quant) == [1] and not any(rule.when for rule in quant.rules)
    if quant.backend is not Backend.emulated or state_slots(quant) or not is_one_map:
        raise ConfigError(
            f"--control noise: {name} has another backend, values outside of products or rules of iterations or with "
            "conditions, whose errors cannot be mirrored; leave it out, or the control"
        )
    entries = [
        entry
        for module in precision_map(model, quant, iteration).values()
        if module.module.name != EMBEDDING  # follows the output layer
        for entry in module.entries()
    ]
    rounded = [each for each in entries if each.spec.quantised and not each.spec.reuse]
    specs = {entry: _rounding(entry, name) for entry in rounded}
    classes = {spec: f"Mirrored{index}" for index, spec in enumerate(dict.fromkeys(specs.values()))}
    module = _written(classes, folder)
    noise = copy.deepcopy(quant)
    noise.name = f"{name}_noise"
    names = {spec: f"{module}:{kind}" for spec, kind in classes.items()}
    noise.formats |= {each: python_definition(each) for each in names.values()}
    noise.rules = [*noise.rules, *_rules(entries, {e: names[s] for e, s in specs.items()})]
    return noise


def _rounding(entry: Entry, scheme: str) -> QuantSpec:
    """The rounding of a slot, without what says where it is.

    Raises:
        ConfigError: the slot does more.
    """
    bare = replace(entry.spec, axis=None, left=True, weight=False, stream="")
    try:
        alone = resolve(bare.fmt.name, **_options(bare))  # type: ignore[arg-type]
    except ValueError:
        alone = None
    if alone != bare or bare.draws:
        raise ConfigError(
            f"--control noise: {entry.label} of {scheme} does more than round one tensor to a shipped format, so that "
            "its errors cannot be mirrored; leave the scheme out, or the control"
        )
    return bare


def _options(spec: QuantSpec) -> dict[str, object]:
    """The options of `quantise` that give this rounding, as plain values."""
    options = {name: getattr(spec, name) for name in _OPTIONS if name in spec.fmt.options}
    if spec.scaling is Scaling.NONE:
        options.pop("amax_target", None)
    if options.get("pre_scale") == 1.0:
        del options["pre_scale"]
    return {name: v.value if isinstance(v, Enum) else v for name, v in options.items()}


def _written(classes: dict[QuantSpec, str], folder: Path) -> str:
    """Write the classes into a module of the folder, which becomes importable; returns the module's name."""
    text = _FILE + "".join(
        f"\nclass {kind}(Mirrored):\n    fmt, options = {spec.fmt.name!r}, {_options(spec)!r}\n\n"
        for spec, kind in classes.items()
    )
    module = f"branch_noise_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"{module}.py", text)
    if (place := str(folder.absolute())) not in sys.path:
        sys.path.append(place)
    importlib.invalidate_caches()
    return module


def _rules(entries: Iterable[Entry], names: dict[Entry, str]) -> list[Rule]:
    """A rule for each slot whose format is the same everywhere, else one for each slot of each module."""
    by_slot: dict[str, list[Entry]] = {}
    for entry in entries:
        by_slot.setdefault(str(key_of(entry, [Aspect.slot])), []).append(entry)
    rules = []
    for alike in by_slot.values():
        is_one = len({names.get(entry) for entry in alike}) == 1
        aspects = [Aspect.slot] if is_one else [Aspect.module, Aspect.slot]
        for entry in alike[:1] if is_one else alike:
            if entry in names:
                rules.append(replace(key_of(entry, aspects).rule(), format=names[entry]))
    return rules
