"""Decides how each tensor is captured in an iteration of the schedule.

A tensor is captured by the capture's own keys, then by its ordered rules, of which the last wins. A rule names layers,
modules, operations and tensors, as the rules of a scheme do, and what it changes: `level` (off drops the tensor, stats
keeps statistics, tensors keeps values too), `values` (before quantisation, after it, both) and the sample. Both the
name of a quantised operand (`input_wgrad`) and the name of its source tensor match the operand. Tensors that are
captured only on request (attention probabilities, weight gradients, the residual stream, router logits) are captured by
a rule that names them in `tensors`. With `capture.level=off` the rules have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from quantexp.capture.operands import OPERAND_TENSORS, source_of
from quantexp.errors import ConfigError
from quantexp.model.decoder import in_words
from quantexp.quant.precision import ModuleId
from quantexp.schema import (
    CaptureConfig,
    CaptureLayout,
    CaptureLevel,
    CaptureRule,
    CaptureValues,
    SampleOf,
    StoreKind,
)

#: Tensors kept only with `capture.attn_weights`.
ATTENTION_WEIGHTS = frozenset({"attn_weights", "exp_scores", "grad_attn_weights", "grad_scores"})
#: Tensors kept only with `capture.weight_grads`.
WEIGHT_GRADS = frozenset({"grad_weight", "main_grad"})
#: The residual stream, kept only with `capture.residual`: after the embedding, attention and the MLP.
RESIDUALS = ("resid_pre", "resid_mid", "resid_post")
RESIDUAL_GRADS = tuple(f"grad_{name}" for name in RESIDUALS)
#: A router's scores of the experts before softmax, kept only with `capture.router_logits`.
ROUTER_LOGITS = ("router_logits", "grad_router_logits")
TENSORS = (
    *("input", "weight", "output", "query", "key", "value", "attn_weights", "exp_scores"),
    *("grad_output", "grad_input", "grad_weight", "main_grad"),
    *("grad_query", "grad_key", "grad_value", "grad_attn_weights", "grad_scores"),
    *(*RESIDUALS, *RESIDUAL_GRADS, *ROUTER_LOGITS),
)
OPERATIONS = ("forward", "backward")


@dataclass(frozen=True)
class Take:
    """The captured part of one tensor."""

    level: CaptureLevel
    #: The maximum number of rows, blocks of rows or heads of the values; 0 means all.
    sample_count: int = 0
    sample_of: SampleOf = SampleOf.rows
    values: CaptureValues = CaptureValues.before

    def unless_replaced(self, replaced: Callable[[], bool]) -> Take:
        """The part of an unquantised tensor, which is dropped if its quantised forms replace it."""
        if self.values is CaptureValues.after and replaced():
            return replace(self, level=CaptureLevel.off)
        return self


def take(
    capture: CaptureConfig, num_layers: int, module: ModuleId, operation: str, tensor: str
) -> Take:
    """The captured part of a module's tensor or quantised operand, in any captured iteration."""
    return take_by(capture, rules_on(capture, num_layers, module), operation, tensor)


def rules_on(capture: CaptureConfig, num_layers: int, module: ModuleId) -> list[int]:
    """The indices of the rules that match a module."""
    return [i for i, rule in enumerate(capture.rules) if module.is_named(rule, num_layers)]


def take_by(capture: CaptureConfig, rules: Sequence[int], operation: str, tensor: str) -> Take:
    """The captured part of a tensor of a module that these rules match."""
    level = capture.level if _is_requested(capture, tensor) else CaptureLevel.off
    if capture.level is CaptureLevel.off:
        return Take(level)
    count, of, values = capture.sample_count, capture.sample_of, capture.values
    for rule in (capture.rules[index] for index in rules):
        if not _means(rule, operation, tensor):
            continue
        if rule.level is not None and (rule.tensors or _is_requested(capture, tensor)):
            level = rule.level
        count = count if rule.sample_count is None else rule.sample_count
        of = rule.sample_of or of
        values = rule.values or values
    if source_of(tensor) != tensor and values is CaptureValues.before:
        level = CaptureLevel.off
    return Take(level, count, of, values)


def _is_requested(capture: CaptureConfig, tensor: str) -> bool:
    tensor = source_of(tensor)
    if tensor in ATTENTION_WEIGHTS:
        return capture.attn_weights
    if tensor in RESIDUALS or tensor in RESIDUAL_GRADS:
        return capture.residual
    if tensor in ROUTER_LOGITS:
        return capture.router_logits
    return capture.weight_grads if tensor in WEIGHT_GRADS else True


def keeps_operands(capture: CaptureConfig) -> bool:
    """Whether any option captures quantised operands."""
    values = [capture.values, *(r.values for r in capture.rules if r.values is not None)]
    return any(v is not CaptureValues.before for v in values)


def _means(rule: CaptureRule, operation: str, tensor: str) -> bool:
    """Whether a rule matches a tensor of its modules."""
    names = {tensor, source_of(tensor)}
    return (not rule.operations or operation in rule.operations) and (
        not rule.tensors or any(fnmatchcase(n, p) for n in names for p in rule.tensors)
    )


def check_capture_rules(capture: CaptureConfig, num_layers: int, modules: list[str]) -> None:
    """Refuse rules that name something that does not exist, or that change nothing.

    Raises:
        ConfigError: names the rule by its index.
    """
    for index, rule in enumerate(capture.rules):
        where = f"capture.rules[{index}]"
        changes = (rule.level, rule.values, rule.sample_count, rule.sample_of)
        if all(change is None for change in changes):
            raise ConfigError(
                f"{where} must say what it changes: level, values, sample_count or sample_of; got none of them"
            )
        for layer in rule.layers:
            if not -num_layers <= layer < num_layers:
                raise ConfigError(
                    f"{where}.layers must lie between {-num_layers} and {num_layers - 1} for {num_layers} layers, "
                    f"got {layer}"
                )
        _match(f"{where}.modules", rule.modules, modules)
        _match(f"{where}.operations", rule.operations, OPERATIONS)
        _match(f"{where}.tensors", rule.tensors, (*TENSORS, *OPERAND_TENSORS))
        _check_operands(where, rule, capture)


def _check_operands(where: str, rule: CaptureRule, capture: CaptureConfig) -> None:
    """Refuse a rule for quantised operands alone if no option captures any."""
    named = [p for p in rule.tensors if any(fnmatchcase(t, p) for t in OPERAND_TENSORS)]
    plain = any(fnmatchcase(t, p) for t in TENSORS for p in rule.tensors)
    if named and not plain and not keeps_operands(capture):
        raise ConfigError(
            f"{where}.tensors names operands after quantisation ({', '.join(named)}), and capture.values=before keeps "
            "none; add values: both to the rule, or drop it"
        )


def _match(key: str, patterns: list[str], names: list[str] | tuple[str, ...]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"{key} must match one of {in_words(names)}, got {pattern!r}")


def check_layout(capture: CaptureConfig) -> None:
    """Refuse folders by format for a capture that has no files for them.

    Raises:
        ConfigError: names what is missing.
    """
    if capture.layout is CaptureLayout.by_run:
        return
    needed = {
        "capture.dir=FOLDER; without it the run's tensors/ has such folders already": capture.dir,
        "capture.store=pt, a file for each tensor": capture.store is StoreKind.pt,
        "capture=tensors, which stores values": holds_values(capture),
    }
    for what, is_given in needed.items():
        if not is_given:
            raise ConfigError(f"capture.layout={capture.layout.value} needs {what}")


def holds_values(capture: CaptureConfig) -> bool:
    """Whether values of any tensor may be stored."""
    return CaptureLevel.tensors in (capture.level, *(rule.level for rule in capture.rules))
