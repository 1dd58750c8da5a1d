"""A run's identity: a hash over everything that determines its numbers, and nothing else.

It covers model, data content, scheme, training, data-parallel size, the layout where it changes numbers, attention
path, device class, the version of the numerics, the backend of linear layers that are not emulated, and whether 16-bit
products go through fp32 because this machine's CPU has no kernel for them. It excludes capture, drawing, the other
launcher options, folders and names. Two runs of one identity produce the same numbers, so a completed run need not run
again. Versions of packages belong to provenance, not to identity; Transformer Engine's, which then multiplies, to both.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quantexp.config.evaluation import maps_of
from quantexp.config.start_point import first_weights, recorded_data, start_point
from quantexp.config.tasks import PACKAGES, task_files, tokenizer_files
from quantexp.errors import DataError
from quantexp.folders import user_path
from quantexp.formats.types import Rounding, Scaling
from quantexp.launch.fingerprints import data_identity, weights_fingerprint
from quantexp.model.checkpoints import require_published
from quantexp.model.huggingface import CONFIG
from quantexp.model.huggingface.fit import require_same_numbers
from quantexp.model.huggingface.token_roles import token_roles
from quantexp.model.huggingface.weights import open_weights
from quantexp.model.layout import Layout
from quantexp.quant.outside_products import state_records
from quantexp.quant.precision import precision_map
from quantexp.quant.records import entry_record
from quantexp.quant.rules import changes, variants, with_rule
from quantexp.runs import gradients
from quantexp.runs.device import multiplies_natively
from quantexp.runs.evaluation import SUFFIX
from quantexp.runs.provenance import versions
from quantexp.schema import (
    Backend,
    Experiment,
    Measure,
    ModelConfig,
    Nonfinite,
    Optimizer,
    QuantConfig,
    When,
)

#: Incremented whenever the values of a format, a product or the initial weights change.
NUMERICS_VERSION = 2
#: Megatron sets them when it builds a model; they choose among attentions of Transformer Engine, which no run has.
_OF_ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def identity(experiment: Experiment, device_class: str) -> dict[str, Any]:
    """The hashed content, readable as JSON.

    Raises:
        DataError: a dataset, tokenizer or weights are missing, or the weights are another model's.
    """
    if experiment.evaluate.only:
        return _evaluation(experiment, device_class)
    training = dataclasses.asdict(experiment.training)
    model = _model(experiment.model)
    attention_path = experiment.training.attention.value
    training.pop("attention")
    if experiment.training.decay_iterations is None:
        training.pop("decay_iterations")
    if experiment.training.nonfinite is Nonfinite.skip:
        training.pop("nonfinite")
    if experiment.training.optimizer is Optimizer.adam:
        del training["optimizer"], training["muon_momentum"]
    for key in ("held_iterations", "chaos", "stop_after"):
        if not training[key]:
            training.pop(key)
    if not _shares_draws(experiment):
        training.pop("weight_cache")
    data = data_identity(experiment.dataset, experiment.model.vocab_size)
    for part, label in (
        (training, "name"),
        (training, "start_from"),
        (training, "start_optimizer"),
        (training, "restart"),
        (training, "distributed_optimizer"),
        (model, "name"),
    ):
        part.pop(label)
    return {
        "model": model,
        "data": data,
        "scheme": _maps(experiment, experiment.quant),
        **_conditions(experiment),
        "training": {
            **{k: v.value if isinstance(v, Enum) else v for k, v in training.items()},
            **_start(experiment, data),
        },
        "attention_path": attention_path,
        "device_class": device_class,
        **_products(experiment, device_class),
        "data_parallel": Layout.of(experiment).data,
        **_layout(experiment),
        "numerics": NUMERICS_VERSION,
        **_backend(experiment),
        **({"gradient": experiment.gradient.by} if experiment.gradient.only else {}),
    }


def _evaluation(experiment: Experiment, device_class: str) -> dict[str, Any]:
    """The identity of an evaluation without training: of the training options, only those of a forward pass."""
    training, model = experiment.training, _model(experiment.model)
    model.pop("name")
    data = data_identity(experiment.dataset, experiment.model.vocab_size)
    start = _start(experiment, data)
    (declared,) = maps_of(experiment)
    if any(e.spec.scaling is Scaling.DELAYED for m in declared.values() for e in m.entries()):
        start |= _histories(experiment)
    return {
        "model": model,
        "data": data,
        "scheme": [[1, [entry_record(e) for m in declared.values() for e in m.entries()]]],
        "training": {
            **{key: getattr(training, key) for key in ("seed", "seq_length", "micro_batch_size")},
            "precision": training.precision.value,
            "deterministic": training.deterministic,
            **({"chaos": training.chaos} if training.chaos else {}),
            **start,
        },
        "evaluation": {
            "samples": experiment.evaluation.samples,
            "each_layer": experiment.evaluate.each_layer,
            "each_module": experiment.evaluate.each_module,
            **_tasks(experiment),
        },
        "attention_path": training.attention.value,
        "device_class": device_class,
        **_products(experiment, device_class),
        "data_parallel": Layout.of(experiment).data,
        **_layout(experiment),
        "numerics": NUMERICS_VERSION,
        **_backend(experiment),
    }


def _backend(experiment: Experiment) -> dict[str, Any]:
    """What multiplies instead of the emulation, its version, and the variables that it reads; empty for the emulation.

    A null version is that of a machine without Transformer Engine, from which a job may be submitted.
    """
    quant = experiment.quant
    if quant.backend is Backend.emulated:
        return {}
    return {
        "backend": {
            "name": quant.backend.value,
            **({"recipe": quant.recipe.value} if quant.recipe else {}),
            "transformer_engine": versions()["transformer-engine"],
            "environment": {
                name: value
                for name, value in sorted(os.environ.items())
                if name.startswith("NVTE_") and name not in _OF_ATTENTION
            },
        }
    }


def _tasks(experiment: Experiment) -> dict[str, Any]:
    """The tasks of an evaluation, and what decides their tokens and answers; empty without tasks."""
    evaluate = experiment.evaluate
    if not evaluate.tasks:
        return {}
    folder = user_path(evaluate.task_folder or "")
    roles = token_roles(first_weights(experiment))
    return {
        "tasks": list(evaluate.tasks),
        "limit": evaluate.limit,
        "fewshot": evaluate.fewshot,
        "score_template": evaluate.score_template,
        "packages": {name: version(name) for name in PACKAGES},
        "files": {str(file.relative_to(folder)): _digest(file) for file in task_files(evaluate)},
        "tokenizer": {file.name: _digest(file) for file in tokenizer_files(experiment.dataset)},
        "tokens": roles.entries
        | {"generation": roles.generation and hashlib.sha256(roles.generation).hexdigest()},
    }


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _histories(experiment: Experiment) -> dict[str, Any]:
    """The fingerprint of the state that holds the checkpoint's amax histories; empty if it holds none."""
    point = start_point(experiment)
    has_state = point is not None and point.state.is_file()
    return {"histories": point.state_fingerprint()} if point is not None and has_state else {}


def _model(model: ModelConfig) -> dict[str, Any]:
    """The model's numbers; MLA, MoE, biases, norms of heads and published weights only if the model has them.

    A window that sequences fit in is left out: it changes no number.

    Published weights enter by the fingerprint of their content.

    Raises:
        DataError: the weights are missing, damaged or another model's.
    """
    numbers = dataclasses.asdict(model)
    numbers.pop("from_hf")
    if numbers.pop("init_from") is not None:
        require_published(user_path(str(model.init_from)), f"model.init_from={model.init_from}")
        numbers["initial_weights"] = weights_fingerprint(model)
    numbers.pop("sliding_window")
    for part in ("mla", "moe", "qkv_bias", "qk_norm"):
        if not numbers[part]:
            numbers.pop(part)
    if model.moe is not None:
        numbers["moe"]["aux_loss"] = model.moe.aux_loss.value
    return numbers


def _layout(experiment: Experiment) -> dict[str, dict[str, Any]]:
    """The sizes that change the order of sums; empty for a model that is not divided.

    Stages change it only where they share the embedding: its two gradients are then added in fp32. Chunks of layers and
    shares of the optimizer never do.
    """
    layout, parallel = Layout.of(experiment), experiment.parallel
    sizes: dict[str, Any] = {}
    if layout.tensor > 1:
        sizes |= {"tensor": layout.tensor, "sequence": layout.sequence}
    if layout.context > 1:
        sizes["context"] = layout.context
    if layout.expert > 1:
        sizes |= {"expert": layout.expert, "expert_tensor": layout.expert_tensor}
        sizes["dispatcher"] = parallel.dispatcher.value
    if layout.pipeline > 1 and experiment.model.tie_embeddings:
        sizes["pipeline"] = layout.pipeline
    return {"layout": sizes} if sizes else {}


def hash8(content: dict[str, Any]) -> str:
    """The first 8 hex digits of the content's sha256."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def folder_name(experiment: Experiment, content: dict[str, Any]) -> str:
    """`<model>_<dataset>_<scheme>-<hash8>`; what does not train says so after its scheme."""
    suffix = SUFFIX * experiment.evaluate.only + gradients.SUFFIX * experiment.gradient.only
    quant = f"{experiment.quant.name}{suffix}"
    return f"{experiment.model.name}_{experiment.dataset.name}_{quant}-{hash8(content)}"


def _start(experiment: Experiment, data: dict[str, str]) -> dict[str, Any]:
    """The fingerprints of the checkpoint that a run starts from; empty if it starts from none.

    Raises:
        DataError: the checkpoint is missing, of another model, or of a run with other data.
    """
    point, option = start_point(experiment), f"training.start_from={experiment.training.start_from}"
    if point is None:
        return {}
    if recorded_data(point) != data and not experiment.evaluate.only:
        raise DataError(
            f"{option} has its place in other data than dataset={experiment.dataset.label}"
        )
    content: dict[str, Any] = {"iteration": point.iteration}
    if point.is_in_shards:
        require_same_numbers(experiment.model, point.weights / CONFIG, option)
        content["state"] = point.state_fingerprint()
    else:
        content["weights"] = weights_fingerprint(experiment.model, point.weights, option)
    if point.padding.is_file():
        content["padding"] = open_weights(point.padding).fingerprint()
    if experiment.training.start_optimizer:
        content["optimizer"] = point.state_fingerprint()
    return {"start": content}


def _products(experiment: Experiment, device_class: str) -> dict[str, str]:
    """Records 16-bit products that go through fp32; empty for native kernels, and for jobs, whose CPU is unknown."""
    if device_class != "cpu" or not experiment.launcher.is_local:
        return {}
    native = multiplies_natively(experiment.training.precision)
    return {} if native else {"products": "fp32"}


def _shares_draws(experiment: Experiment) -> bool:
    """Whether the weight cache makes the micro-batches of a step share one stochastic rounding of a weight.

    This is the only case in which the cache changes numbers; any other cached copy equals a recomputed one bit for bit.
    In all other cases, and for steps of a single micro-batch, the identity is the same as without a weight cache.
    """
    training = experiment.training
    return (
        training.weight_cache
        and training.global_batch_size > training.micro_batch_size
        and any(
            entry.spec.once_per_step and entry.spec.rounding is Rounding.STOCHASTIC
            for quant in (experiment.quant, *variants(experiment.quant))
            for iteration in changes(quant)
            if iteration <= training.last_iteration
            for declared in precision_map(experiment.model, quant, iteration).values()
            for entry in declared.entries()
        )
    )


def _conditions(experiment: Experiment) -> dict[str, Any]:
    """The conditions of rules, each with the maps where it alone is met from the first iteration on."""
    quant = experiment.quant
    conditions = [
        [
            {
                **dataclasses.asdict(rule.when),
                "measure": rule.when.measure.value,
                **_evaluations(experiment, rule.when),
            },
            _maps(experiment, with_rule(quant, index)),
        ]
        for index, rule in enumerate(quant.rules)
        if rule.when is not None
    ]
    return {"conditions": conditions} if conditions else {}


def _evaluations(experiment: Experiment, when: When) -> dict[str, Any]:
    """What decides a validation loss."""
    evaluation = experiment.evaluation
    if when.measure is not Measure.validation_loss:
        return {}
    return {"every": evaluation.every, "samples": evaluation.samples}


def _maps(experiment: Experiment, quant: QuantConfig) -> list[Any]:
    """The precision map at each iteration where it changes; what is rounded outside of products is in each."""
    outside = state_records(quant)
    return [
        [
            iteration,
            [entry_record(e) for module in declared.values() for e in module.entries()] + outside,
        ]
        for iteration in changes(quant)
        if iteration <= experiment.training.last_iteration
        for declared in (precision_map(experiment.model, quant, iteration),)
    ]
