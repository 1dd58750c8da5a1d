"""The names of captured tensors and the terms of their metadata.

    {timestamp}_{counter}_{layer_type}_{layer_idx}_{operation}_{phase}_{component}_{quant_type}_{tensor_name}.pt

`timestamp` is the run's start (YYYYmmdd_HHMMSS), `counter` counts the run's files, `layer_idx` is `L3-fc1` for a
linear layer or a norm and `L3` for attention, the residual stream and the router. `quant_type`, also the folder, is for
a linear layer the format of fprop's input; for attention QK's format, or PV's where QK has none; for a norm the gain's,
or the result's where the gain has none; the residual stream and the router are never quantised.
No program needs to parse a name, because the manifest has all parts. Collections without a manifest are an exception:
`metadata_of` parses their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from quantexp.capture.operands import slot_key
from quantexp.formats.spec import QuantSpec
from quantexp.formats.types import Format
from quantexp.model.decoder import ATTENTION, is_norm
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.records import spec_record
from quantexp.quant.sites import FPROP_Q, FPROP_V, FPROP_X, NORM_W, NORM_Y
from quantexp.quant.slots import WORKING

#: The module of the residual stream's tensors.
RESIDUAL = "residual"
#: The module of the tensors of a router of experts.
ROUTER = "router"
#: The layer type of norms.
NORM = "norm"
#: Modules that are also a layer type -> the component of their tensors.
_COMPONENTS = {ATTENTION: "FA", RESIDUAL: RESIDUAL, ROUTER: ROUTER}


def start_timestamp() -> str:
    """The timestamp at the start of the names of a run's files."""
    return datetime.now(UTC).strftime("%Y%m%d_%H%M%S")


@dataclass(frozen=True)
class TensorName:
    """The identity of a captured tensor within one micro-batch of a run."""

    layer: int
    module: str
    operation: str
    phase: str
    tensor: str
    quant_type: str

    @property
    def layer_type(self) -> str:
        """`attention`, `residual`, `router`, `norm` or `linear`."""
        if is_norm(self.module):
            return NORM
        return self.module if self.module in _COMPONENTS else "linear"

    @property
    def component(self) -> str:
        """`FA` for attention, else the layer type."""
        return _COMPONENTS.get(self.module, self.layer_type)

    @property
    def layer_idx(self) -> str:
        """`L3`, or `L3-fc1`."""
        return place(self.layer, self.module)

    def file(self, timestamp: str, counter: int) -> str:
        """The path relative to the tensors folder."""
        return (
            f"{self.quant_type}/{timestamp}_{counter:04d}_{self.layer_type}_{self.layer_idx}_"
            f"{self.operation}_{self.phase}_{self.component}_{self.quant_type}_{self.tensor}.pt"
        )


def place(layer: int, module: str) -> str:
    """`L3`, or `L3-fc1`: a module as file names and messages call it."""
    return f"L{layer}" if module in _COMPONENTS else f"L{layer}-{module}"


def quant_type(precision: ModulePrecision) -> str:
    """The short name of the format that names a module's folder."""
    if not precision.slots:
        return WORKING
    if precision.is_linear:
        return short_name(precision.spec(FPROP_X).fmt)
    first, second = (NORM_W, NORM_Y) if NORM_W in precision.slots else (FPROP_Q, FPROP_V)
    spec = precision.spec(first)
    return short_name((spec if spec.quantised else precision.spec(second)).fmt)


def short_name(fmt: Format) -> str:
    """`mxfp8` for mxfp8_e4m3; in a name without a short form a hyphen replaces the underscore."""
    return (fmt.aliases[0] if fmt.aliases else fmt.label).replace("_", "-")


def formats_record(
    precision: ModulePrecision, moment: Callable[[QuantSpec], dict[str, object]]
) -> dict[str, dict[str, object]]:
    """Every slot of the module with format and options: `fprop.x` for linear, `qk.fprop.q` for attention.

    `moment` returns the other inputs of a slot's values: seed and offset, signs, amax.
    """
    return {
        slot_key(slot): spec_record(spec) | moment(spec) for slot, spec in precision.slots.items()
    }


_NAME = re.compile(
    r"(?P<timestamp>\d{8}_\d{6})_(?P<counter>\d+)_"
    r"(?P<layer_type>attention|linear|norm|residual|router)_"
    r"(?:L(?P<layer>\d+)(?:-(?P<module>[^_]+))?_)?"
    r"(?P<operation>forward|backward)_"
    r"(?:(?P<phase>pre|post)_(?P<component>[^_]+)_|(?!pre_|post_))"
    r"(?P<quant_type>[^_]+)_(?P<tensor>\w+)\.pt"
)


def metadata_of(name: str) -> dict[str, Any] | None:
    """The metadata in a file's name; None if it is not the name of a captured tensor."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    parts: dict[str, Any] = match.groupdict()
    parts["counter"] = int(parts["counter"])
    if parts["layer"] is not None:
        parts["layer"] = int(parts["layer"])
    if parts["module"] is None and parts["layer_type"] in _COMPONENTS:
        parts["module"] = parts["layer_type"]
    return parts
