"""What a scheme rounds outside of matrix products: the training state, and gradients that ranks send.

    optimizer.master.w                    master weights after each step, as the next one reads them
    optimizer.smooth.dw                   gradients, with a term of the noise that a format's stochastic rounding has
    optimizer.pull.w, .reset.w            master weights that are pulled towards a format, and reset if they oscillate
    optimizer.adam.exp_avg, .exp_avg_sq   moments, the same
    optimizer.muon.momentum               the same
    grad_reduce.once.dw                   each rank's own gradient, before the ranks add theirs in float32
    grad_reduce.each_hop.dw               the sum so far, before a rank sends it to the next one

Moments and gradients are those of all parameters, norms and the embedding included, master weights those of linear
layers, or of all parameters too; rules do not change them. Blocks run along the last axis of the whole parameter, which
is a linear layer's input width. All stay in float32 tensors: this is emulation. Moments in 8 bits: COAT (arXiv
2410.19313, section 4) and FP8-LM (arXiv 2310.18313, section 2.2); gradients in 8 bits: FP8-LM, section 2.1; master
weights in a format, with the error added to Adam's first moment: ECO (arXiv 2601.22101). Needs no torch.
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
from quantexp.schema import (
    Experiment,
    Optimizer,
    Parameters,
    QuantConfig,
    Rounded,
    TrainingConfig,
)

OPTIMIZER, GRAD_REDUCE = "optimizer", "grad_reduce"
#: Muon's moment; see `quantexp.model.training_state`.
MOMENTUM = "momentum"
_MOMENTS = ("exp_avg", "exp_avg_sq", MOMENTUM)
#: The products of master weights, which are their keys too, in the order in which they take part in a step.
SMOOTH, PULL, RESET, MASTER = "smooth", "pull", "reset", "master"
WEIGHTS = (SMOOTH, PULL, RESET, MASTER)
#: The module of these entries in the precision map: all parameters, or weights of the decoder's linear layers.
ALL, LINEAR = "all parameters", "linear weights"
#: Options of `Rounded` besides the format; slots have pre-scaling, too.
_ROUNDED = vars(Rounded())
_OPTIONS = tuple(option for option in QUANTISE_OPTIONS if option != "pre_scale")


@dataclass(frozen=True)
class StateSlot:
    """Values of all parameters that are rounded; `optimizer.adam.exp_avg` as text."""

    site: str
    #: `adam`, `muon`, or one of `WEIGHTS`; of the reduction, where it rounds: `once` or `each_hop`.
    product: str
    operand: str
    spec: QuantSpec
    module: str = ALL
    #: Of master weights: their further options, in the order of their keys.
    options: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        return f"{self.site}.{self.product}.{self.operand}"

    @property
    def axis(self) -> Axis | None:
        """The axis that blocks run along."""
        return self.spec.axis

    @property
    def feedback(self) -> bool:
        """Whether the error of rounding is added to Adam's first moment."""
        return bool(dict(self.options).get("feedback"))

    def record(self) -> dict[str, object]:
        """An entry of the precision map's JSON, like `entry_record`; it has no layer."""
        return {
            "layer": None,
            "module": self.module,
            "site": self.site,
            "product": self.product,
            "operand": self.operand,
            **spec_record(self.spec),
            **{key: value for key, value in self.options if value is not False},
        }


def moment_slots(quant: QuantConfig) -> list[StateSlot]:
    """The moments that a scheme rounds; `operand` is the key of the optimizer's state.

    Raises:
        ConfigError: an unknown format or option, or one that moments cannot have.
    """
    declared = declared_formats(quant)
    specs = {
        name: _spec(f"quant.{OPTIMIZER}.{name}", getattr(quant.optimizer, name), declared)
        for name in _MOMENTS
    }
    return [
        StateSlot(OPTIMIZER, "muon" if name == MOMENTUM else "adam", name, spec)
        for name, spec in specs.items()
        if spec is not None
    ]


def weight_slots(quant: QuantConfig) -> list[StateSlot]:
    """The master weights that a scheme rounds, in the order in which it does.

    Raises:
        ConfigError: as `moment_slots`.
    """
    declared, slots = declared_formats(quant), []
    for name in WEIGHTS:
        config: Rounded = getattr(quant.optimizer, name)
        spec = _spec(f"quant.{OPTIMIZER}.{name}", config, declared, Operand.W)
        options = {k: v for k, v in vars(config).items() if k not in _ROUNDED}
        covered = options.pop("parameters", Parameters.linear)
        if spec is not None:
            module = ALL if covered is Parameters.all else LINEAR
            operand = "dw" if name == SMOOTH else "w"
            slots.append(StateSlot(OPTIMIZER, name, operand, spec, module, tuple(options.items())))
    return slots


def reduced_slot(quant: QuantConfig) -> StateSlot | None:
    """The gradient that ranks send to each other; None if a scheme does not round it.

    Raises:
        ConfigError: an unknown format or option, or one that gradients cannot have.
    """
    config = quant.grad_reduce
    spec = _spec(f"quant.{GRAD_REDUCE}", config, declared_formats(quant))
    return None if spec is None else StateSlot(GRAD_REDUCE, config.at.value, "dw", spec)


def state_slots(quant: QuantConfig) -> list[StateSlot]:
    """The master weights, the moments and the gradient that a scheme rounds."""
    reduced = reduced_slot(quant)
    return [*weight_slots(quant), *moment_slots(quant), *([] if reduced is None else [reduced])]


def state_records(quant: QuantConfig) -> list[dict[str, object]]:
    """Their entries of the precision map."""
    return [slot.record() for slot in state_slots(quant)]


def check_outside_products(experiment: Experiment) -> None:
    """Refuse what cannot be rounded, and a rounded reduction where no rank sends a gradient.

    Raises:
        ConfigError: names the key.
    """
    training = experiment.training
    has_momentum = any(slot.operand == MOMENTUM for slot in moment_slots(experiment.quant))
    if has_momentum and training.optimizer is not Optimizer.muon:
        raise ConfigError(
            f"quant.{OPTIMIZER}.{MOMENTUM}.format rounds Muon's momentum; add training.optimizer=muon, or leave it out"
        )
    for slot in weight_slots(experiment.quant):
        if slot.feedback:
            _check_feedback(training)
        if slot.product == RESET:
            _check_reset(slot)
        if slot.product == SMOOTH:
            _check_smooth(slot)
    layout = Layout.of(experiment)
    if reduced_slot(experiment.quant) is None or experiment.evaluate.only:
        return
    if layout.data * layout.context == 1:
        raise ConfigError(
            f"quant.{GRAD_REDUCE}.format rounds gradients that data-parallel ranks send to each other, got one rank, "
            f"which sends none; take launcher.num_processes={2 * layout.model_ranks} or more, or leave it out"
        )


def _check_reset(slot: StateSlot) -> None:
    key, options = f"quant.{OPTIMIZER}.{RESET}", dict(slot.options)
    if options["over"] + 1 >= options["every"]:
        raise ConfigError(
            f"{key}.every must be above {key}.over + 1, so that one observation ends before the next, got "
            f"{options['every']} and {options['over']}"
        )
    if slot.spec.draws:
        raise ConfigError(
            f"{key}.rounding must not be stochastic: a weight that stands still would seem to oscillate; take even or "
            "away"
        )


def _check_smooth(slot: StateSlot) -> None:
    key, scale = f"quant.{OPTIMIZER}.{SMOOTH}", slot.spec.fmt.grid_scale
    if scale is not None and not scale.is_of_amax:
        raise ConfigError(
            f"{key}.format {slot.spec.fmt.name} has more than a scale that follows from a block's amax, so that the "
            "neighbours of a weight are not known; take another format"
        )
    if slot.spec.draws:
        raise ConfigError(
            f"{key}.rounding has no meaning: the term is that of stochastic rounding, and draws nothing; remove it"
        )


def _check_feedback(training: TrainingConfig) -> None:
    key = f"quant.{OPTIMIZER}.{MASTER}.feedback"
    if training.optimizer is Optimizer.muon:
        raise ConfigError(
            f"{key} adds the error of a weight to Adam's first moment, and Muon orthogonalises its momentum, after "
            "which it would not be that error; take training.optimizer=adam, or remove it"
        )
    if not training.adam_beta1:
        raise ConfigError(
            f"{key} adds the error of a weight to Adam's first moment, of which training.adam_beta1=0 keeps nothing; "
            "take a larger one, or remove it"
        )


def _spec(
    key: str, config: Rounded, declared: Mapping[str, Format], operand: Operand = Operand.G
) -> QuantSpec | None:
    """The specification; None where nothing is rounded."""
    setting = Setting(key, config)
    if config.format is None:
        default = vars(type(config)())
        for option, value in vars(config).items():
            if value != default[option]:
                raise ConfigError(
                    f"{key}.{option} is set and {key}.format is not; set the format, or remove it"
                )
        return None
    fmt = _format(key, config.format, declared)
    options = {name: setting for name in _OPTIONS if getattr(config, name) is not None}
    spec = scheme_spec(fmt, operand, options)
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
