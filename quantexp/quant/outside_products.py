"""What a scheme rounds outside of matrix products: the optimizer's moments, and gradients that ranks send.

    optimizer.adam.exp_avg, .exp_avg_sq   after each step, as the next one reads them
    optimizer.muon.momentum               the same
    grad_reduce.once.dw                   each rank's own gradient, before the ranks add theirs in float32
    grad_reduce.each_hop.dw               the sum so far, before a rank sends it to the next one

They cover all parameters that have them, norms and the embedding included; rules do not change them. Blocks run along
the last axis of the whole parameter, which is a linear layer's input width. Moments and gradients stay in float32
tensors: this is emulation. Moments in 8 bits: COAT (arXiv 2410.19313, section 4) and FP8-LM (arXiv 2310.18313, section
2.2); gradients in 8 bits: FP8-LM, section 2.1. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from quantexp.errors import ConfigError
from quantexp.formats.definitions.files import known_names
from quantexp.formats.spec import QuantSpec, get_format
from quantexp.formats.types import Axis, Family, Format, Scaling
from quantexp.model.layout import Layout
from quantexp.quant.choosing import QUANTISE_OPTIONS, Setting, scheme_spec
from quantexp.quant.records import spec_record
from quantexp.quant.sites import Operand
from quantexp.quant.slots import declared_formats
from quantexp.schema import Experiment, Optimizer, QuantConfig, Rounded

OPTIMIZER, GRAD_REDUCE = "optimizer", "grad_reduce"
#: Muon's moment; see `quantexp.model.training_state`.
MOMENTUM = "momentum"
#: The module of these entries in the precision map.
ALL = "all parameters"
#: Options of `Rounded` besides the format; slots have pre-scaling, too.
_OPTIONS = tuple(option for option in QUANTISE_OPTIONS if option != "pre_scale")


@dataclass(frozen=True)
class StateSlot:
    """Values of all parameters that are rounded; `optimizer.adam.exp_avg` as text."""

    site: str
    #: `adam` or `muon`; of the reduction, where it rounds: `once` or `each_hop`.
    product: str
    operand: str
    spec: QuantSpec

    def __str__(self) -> str:
        return f"{self.site}.{self.product}.{self.operand}"

    @property
    def axis(self) -> Axis | None:
        """The axis that blocks run along."""
        return self.spec.axis

    def record(self) -> dict[str, object]:
        """An entry of the precision map's JSON, like `entry_record`; it has no layer."""
        return {
            "layer": None,
            "module": ALL,
            "site": self.site,
            "product": self.product,
            "operand": self.operand,
            **spec_record(self.spec),
        }


def moment_slots(quant: QuantConfig) -> list[StateSlot]:
    """The moments that a scheme rounds; `operand` is the key of the optimizer's state.

    Raises:
        ConfigError: an unknown format or option, or one that moments cannot have.
    """
    declared = declared_formats(quant)
    moments = vars(quant.optimizer)
    specs = {
        name: _spec(f"quant.{OPTIMIZER}.{name}", config, declared)
        for name, config in moments.items()
    }
    return [
        StateSlot(OPTIMIZER, "muon" if name == MOMENTUM else "adam", name, spec)
        for name, spec in specs.items()
        if spec is not None
    ]


def reduced_slot(quant: QuantConfig) -> StateSlot | None:
    """The gradient that ranks send to each other; None if a scheme does not round it.

    Raises:
        ConfigError: an unknown format or option, or one that gradients cannot have.
    """
    config = quant.grad_reduce
    spec = _spec(f"quant.{GRAD_REDUCE}", config, declared_formats(quant))
    return None if spec is None else StateSlot(GRAD_REDUCE, config.at.value, "dw", spec)


def state_slots(quant: QuantConfig) -> list[StateSlot]:
    """The moments and the gradient that a scheme rounds."""
    reduced = reduced_slot(quant)
    return [*moment_slots(quant), *([] if reduced is None else [reduced])]


def state_records(quant: QuantConfig) -> list[dict[str, object]]:
    """Their entries of the precision map."""
    return [slot.record() for slot in state_slots(quant)]


def check_outside_products(experiment: Experiment) -> None:
    """Refuse what cannot be rounded, and a rounded reduction where no rank sends a gradient.

    Raises:
        ConfigError: names the key.
    """
    has_momentum = any(slot.operand == MOMENTUM for slot in moment_slots(experiment.quant))
    if has_momentum and experiment.training.optimizer is not Optimizer.muon:
        raise ConfigError(
            f"quant.{OPTIMIZER}.{MOMENTUM}.format rounds Muon's momentum; add training.optimizer=muon, or leave it out"
        )
    layout = Layout.of(experiment)
    if reduced_slot(experiment.quant) is None or experiment.evaluate.only:
        return
    if layout.data * layout.context == 1:
        raise ConfigError(
            f"quant.{GRAD_REDUCE}.format rounds gradients that data-parallel ranks send to each other, got one rank, "
            f"which sends none; take launcher.num_processes={2 * layout.model_ranks} or more, or leave it out"
        )


def _spec(key: str, config: Rounded, declared: Mapping[str, Format]) -> QuantSpec | None:
    """The specification; None where nothing is rounded."""
    setting = Setting(key, config)
    if config.format is None:
        default = type(config)()
        for option in (*_OPTIONS, "at"):
            if getattr(config, option, None) != getattr(default, option, None):
                raise ConfigError(
                    f"{key}.{option} is set and {key}.format is not; set the format, or remove it"
                )
        return None
    fmt = _format(key, config.format, declared)
    options = {name: setting for name in _OPTIONS if getattr(config, name) is not None}
    spec = scheme_spec(fmt, Operand.G, options)
    if spec.scaling is Scaling.DELAYED:
        raise ConfigError(
            f"{key}.scaling must not be delayed, which is for operands of products; take current or exact"
        )
    return replace(spec, axis=Axis.INPUT_WIDTH)


def _format(key: str, name: str, declared: Mapping[str, Format]) -> Format:
    """The format with a name, if values outside of products can have it."""
    formats = {each: get_format(each, declared) for each in known_names(declared)}
    fmt = formats.get(name)
    if fmt is None or fmt.family is Family.BF16:
        possible = ", ".join(sorted(each for each in formats if _is_possible(formats[each])))
        raise ConfigError(
            f"{key}.format must be one of {possible}, or null for float32, got {name!r}"
        )
    if not _is_possible(fmt):
        kind = (
            "is a class of yours" if fmt.family is Family.PYTHON else "has blocks of several rows"
        )
        raise ConfigError(
            f"{key}.format {fmt.name} {kind}, and ranks divide parameters between them; take a format with blocks of "
            "one row, or with one scale a tensor"
        )
    return fmt


def _is_possible(fmt: Format) -> bool:
    """Whether a rank can round its part of a parameter by itself."""
    return fmt.family not in (Family.BF16, Family.PYTHON) and fmt.across == 1
