"""What is kept of each tensor: the capture's own keys, then its ordered rules, the later winning.

A rule names layers, modules, operations and tensors, as the rules of a scheme do, and what it changes: `level` (off
leaves out, stats keeps statistics, tensors keeps values too) and the sample. A tensor that is kept only on request
(the attention probabilities, weight gradients) is taken by a rule that names it in `tensors`. With `capture.level=off`
no rule takes anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from quantexp.errors import ConfigError
from quantexp.quant.precision import ModuleId
from quantexp.ranges import at_least
from quantexp.schema import CaptureConfig, CaptureLevel, CaptureRule, SampleOf

#: Tensors kept only with `capture.attn_weights`.
ATTENTION_WEIGHTS = frozenset({"attn_weights", "grad_attn_weights"})
#: Tensors kept only with `capture.weight_grads`.
WEIGHT_GRADS = frozenset({"grad_weight", "main_grad"})
TENSORS = (
    *("input", "weight", "output", "query", "key", "value", "attn_weights"),
    *("grad_output", "grad_input", "grad_weight", "main_grad"),
    *("grad_query", "grad_key", "grad_value", "grad_attn_weights"),
)
OPERATIONS = ("forward", "backward")


@dataclass(frozen=True)
class Take:
    """What is kept of one tensor."""

    level: CaptureLevel
    #: At most so many rows, blocks of rows or heads of the values; 0 is all.
    sample_count: int = 0
    sample_of: SampleOf = SampleOf.rows


def take(
    capture: CaptureConfig, num_layers: int, module: ModuleId, operation: str, tensor: str
) -> Take:
    """What is kept of a tensor of a module, whichever iteration it passes in."""
    level = capture.level if _asked_for(capture, tensor) else CaptureLevel.off
    if capture.level is CaptureLevel.off:
        return Take(level)
    count, of = capture.sample_count, capture.sample_of
    for rule in capture.rules:
        if not _applies(rule, num_layers, module, operation, tensor):
            continue
        if rule.level is not None and (rule.tensors or _asked_for(capture, tensor)):
            level = rule.level
        count = count if rule.sample_count is None else rule.sample_count
        of = rule.sample_of or of
    return Take(level, count, of)


def _asked_for(capture: CaptureConfig, tensor: str) -> bool:
    if tensor in ATTENTION_WEIGHTS:
        return capture.attn_weights
    return capture.weight_grads if tensor in WEIGHT_GRADS else True


def _applies(
    rule: CaptureRule, num_layers: int, module: ModuleId, operation: str, tensor: str
) -> bool:
    layers = [layer % num_layers for layer in rule.layers]
    return (
        (not layers or module.layer in layers)
        and (not rule.modules or any(fnmatchcase(module.name, p) for p in rule.modules))
        and (not rule.operations or operation in rule.operations)
        and (not rule.tensors or any(fnmatchcase(tensor, p) for p in rule.tensors))
    )


def check_capture_rules(capture: CaptureConfig, num_layers: int, modules: list[str]) -> None:
    """Refuse rules that name what does not exist, or change nothing.

    Raises:
        ConfigError: naming the rule by its index.
    """
    at_least("capture.sample_count", capture.sample_count, 0)
    for index, rule in enumerate(capture.rules):
        where = f"capture.rules[{index}]"
        if rule.level is None and rule.sample_count is None and rule.sample_of is None:
            raise ConfigError(
                f"{where} must say what it changes: level, sample_count or sample_of; got none of them"
            )
        if rule.sample_count is not None:
            at_least(f"{where}.sample_count", rule.sample_count, 0)
        for layer in rule.layers:
            if not -num_layers <= layer < num_layers:
                raise ConfigError(
                    f"{where}.layers must lie between {-num_layers} and {num_layers - 1} for {num_layers} layers, "
                    f"got {layer}"
                )
        _match(f"{where}.modules", rule.modules, modules)
        _match(f"{where}.operations", rule.operations, OPERATIONS)
        _match(f"{where}.tensors", rule.tensors, TENSORS)


def _match(key: str, patterns: list[str], names: list[str] | tuple[str, ...]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"{key} must match one of {', '.join(names)}, got {pattern!r}")
