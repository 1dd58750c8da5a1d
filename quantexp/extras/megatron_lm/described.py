"""Describes a Megatron-LM run as an experiment: its arguments as keys of quantexp, the scheme and capture as asked.

The experiment names modules and slots, and the verbs that read run folders read it. It decides no number of the run
other than the scheme's: data, initial weights, schedule and optimizer are those of Megatron-LM's arguments.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantexp.config.compose import compose
from quantexp.errors import ConfigError
from quantexp.quant.outside_products import state_slots
from quantexp.quant.precision import quantises_norms
from quantexp.quant.units import aspects_of
from quantexp.schema import Experiment, ModelConfig

#: A scheme: its name, the path of its YAML, or words such as `quant=FA_mxfp8 quant/pv=hifp8`.
QUANT = "QUANTEXP_QUANT"
#: A capture: `stats`, `tensors`, or words such as `capture=tensors capture.iterations=[1,100]`. Without it: off.
CAPTURE = "QUANTEXP_CAPTURE"
#: What `gradient.by` of `quantexp bisect --gradient` has: `layer`, or `layer,slot`. Compares gradients, trains nothing.
GRADIENT = "QUANTEXP_GRADIENT"
#: The name of model and data in run folders.
NAME = "megatron_lm"
#: Keys that are without meaning here.
_NO_RUN = (
    "dataset=dolma",
    f"dataset.name={NAME}",
    "analysis.auto=false",
    "tracking.tensorboard=false",
    "memory=ignore",
)


def experiment_of(args: Any, environment: Mapping[str, str]) -> Experiment:
    """The experiment of Megatron-LM's parsed arguments.

    Raises:
        ConfigError: the scheme or capture is unknown, or the model or layout is not one that quantexp describes.
    """
    config_dir, scheme = _scheme(args, environment)
    asked = [*_capture(environment), *_gradient(args, environment)]
    words = [*_model(args), *_training(args), *_parallel(args), *scheme, *asked]
    with tempfile.TemporaryDirectory() as folder:
        try:
            experiment = compose(words, _folder_of(config_dir, Path(folder)), environment={})
        except ConfigError as error:
            raise ConfigError(f"Megatron-LM's arguments, or the scheme: {error}") from error
    data = (args.data_path or ["mock data" if args.mock_data else "data"])[-1]
    experiment.dataset.name, experiment.dataset.label = NAME, f"Megatron-LM ({data})"
    experiment.dataset.path, experiment.model.name = None, NAME
    experiment.model.from_hf = experiment.model.init_from = None
    if state_slots(experiment.quant):
        raise ConfigError(
            f"{QUANT}={environment.get(QUANT)} rounds the optimizer's moments or the reduced gradients, which "
            "Megatron-LM's loop keeps to itself; choose a scheme of products alone, or train with quantexp"
        )
    if any(rule.when for rule in experiment.quant.rules):
        raise ConfigError(
            f"{QUANT}={environment.get(QUANT)} has rules with conditions (when), which look at the metrics of "
            "quantexp's own loop; give them iterations, or train with quantexp"
        )
    if quantises_norms(experiment.quant):
        raise ConfigError(
            f"{QUANT}={environment.get(QUANT)} quantises norms (quant.norm), and Megatron-LM has norms of its own, or "
            "Transformer Engine's; choose a scheme without them, or train with quantexp"
        )
    return experiment


def model_of(args: Any) -> ModelConfig:
    """The model of Megatron-LM's arguments alone.

    Raises:
        ConfigError: quantexp describes no such model.
    """
    return compose(
        [*_model(args), *_NO_RUN, f"training.seq_length={args.seq_length}"], environment={}
    ).model


def _scheme(args: Any, environment: Mapping[str, str]) -> tuple[Path | None, list[str]]:
    """The scheme's file, if it is one, and its words.

    Raises:
        ConfigError: no scheme, a file that does not exist, or words about something else.
    """
    value = environment.get(QUANT, "").strip()
    if not value:
        if getattr(args, "te_precision_config_file", None) is not None:
            return None, ["quant=bf16"]
        raise ConfigError(
            f"{QUANT} is not set: set it to a scheme's name (bf16, FA_linear_mxfp8, ...), the path of its YAML, or "
            "words such as 'quant=FA_mxfp8 quant/pv=hifp8'; `quantexp list schemes` lists them"
        )
    if value.endswith((".yaml", ".yml")):
        file = Path(value).expanduser().absolute()
        if not file.is_file():
            raise ConfigError(f"{QUANT}={value} is no file; give the path of a scheme's YAML")
        return file, [f"quant={file.stem}"]
    return None, _words(QUANT, value, "quant")


def _capture(environment: Mapping[str, str]) -> list[str]:
    return _words(CAPTURE, environment.get(CAPTURE, "").strip() or "off", "capture")


def _gradient(args: Any, environment: Mapping[str, str]) -> list[str]:
    """The words of a comparison of gradients, which is of one scheme and captures nothing.

    Raises:
        ConfigError: an aspect is unknown, or it is asked for beside something that it excludes.
    """
    value = environment.get(GRADIENT, "").strip()
    if not value:
        return []
    aspects_of(value.split(","), GRADIENT)
    if environment.get(CAPTURE, "").strip():
        raise ConfigError(f"{GRADIENT} captures nothing; unset {CAPTURE}")
    if getattr(args, "te_precision_config_file", None) is not None:
        raise ConfigError(
            f"{GRADIENT} compares parts of one scheme; drop --te-precision-config-file"
        )
    return ["gradient.only=true", f"gradient.by=[{value}]", "training.stop_after=1"]


def _words(variable: str, value: str, group: str) -> list[str]:
    """A name as a word, or the words of a group."""
    words = shlex.split(value)
    if len(words) == 1 and "=" not in value:
        return [f"{group}={value}"]
    for word in words:
        if not word.lstrip("+").startswith((f"{group}=", f"{group}.", f"{group}/")):
            raise ConfigError(
                f"{variable} must be a name, or words that begin with {group}= or {group}., got {word!r}"
            )
    return words


def _folder_of(file: Path | None, empty: Path) -> Path | None:
    """A folder in which Hydra finds the scheme of a file as `quant/NAME.yaml`, with the formats beside it."""
    if file is None:
        return None
    if file.parent.name == "quant":
        return file.parent.parent
    (empty / "quant").mkdir()
    (empty / "quant" / f"{file.stem}.yaml").write_text(file.read_text())
    return empty


def _model(args: Any) -> list[str]:
    heads = args.num_attention_heads
    numbers: dict[str, object] = {
        "num_layers": args.num_layers,
        "hidden_size": args.hidden_size,
        "ffn_hidden_size": args.ffn_hidden_size,
        "num_attention_heads": heads,
        "num_query_groups": args.num_query_groups if args.group_query_attention else heads,
        "head_dim": args.kv_channels,
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": max(args.max_position_embeddings, args.seq_length),
        "norm_epsilon": _norm_epsilon(args),
        "rotary_base": args.rotary_base,
        "rope_scaling_factor": args.rope_scaling_factor if args.use_rope_scaling else "null",
        "tie_embeddings": not args.untie_embeddings_and_output_weights,
        "init_std": args.init_method_std,
        "qkv_bias": args.add_qkv_bias,
        "qk_norm": args.qk_layernorm and not args.multi_latent_attention,
    }
    if args.multi_latent_attention:
        numbers |= {
            "num_query_groups": heads,
            "head_dim": args.qk_head_dim + args.qk_pos_emb_head_dim,
            "rope_scaling_factor": "null",
        }
    is_plain = not args.multi_latent_attention and not args.num_experts
    base = "llama32-1b" if is_plain else "deepseek2_lite"  # which has both parts
    parts = [] if is_plain else [*_latent(args), *_experts(args)]
    return [f"model={base}", *_overrides("model", numbers), *parts]


def _norm_epsilon(args: Any) -> float:
    """The number that 0.15 and 0.16 name differently."""
    named = getattr(args, "layernorm_epsilon", None)
    return float(args.norm_epsilon if named is None else named)


def _latent(args: Any) -> list[str]:
    if not args.multi_latent_attention:
        return ["model.mla=null"]
    keys = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    numbers = {key: getattr(args, key) for key in keys}
    return [*_overrides("model.mla", numbers), *_yarn(args)]


def _yarn(args: Any) -> list[str]:
    """YaRN's frequencies; what Megatron-LM has no argument for is Megatron's, and a factor of 1 changes nothing."""
    if args.rope_type == "rope" or args.rotary_scaling_factor == 1:
        return ["model.mla.yarn=null"]
    numbers = {
        "factor": args.rotary_scaling_factor,
        "original_length": getattr(args, "original_max_position_embeddings", 4096),
        "beta_fast": getattr(args, "beta_fast", 32.0),
        "beta_slow": getattr(args, "beta_slow", 1.0),
        "mscale": args.mscale,
        "mscale_all_dim": args.mscale_all_dim,
    }
    return _overrides("model.mla.yarn", numbers)


def _experts(args: Any) -> list[str]:
    if not args.num_experts:
        return ["model.moe=null"]
    width = args.moe_ffn_hidden_size or args.ffn_hidden_size
    numbers = {
        "num_experts": args.num_experts,
        "top_k": args.moe_router_topk,
        "expert_ffn_hidden_size": width,
        "num_shared_experts": (args.moe_shared_expert_intermediate_size or 0) // width,
        "num_dense_layers": _num_dense_layers(args),
        "norm_topk_prob": not args.moe_router_pre_softmax and args.moe_router_topk > 1,
        "routed_scaling_factor": args.moe_router_topk_scaling_factor or 1.0,
        "aux_loss": "none",
        "aux_loss_coefficient": 0,
    }
    return _overrides("model.moe", numbers)


def _num_dense_layers(args: Any) -> int:
    """The layers before the first with experts; their pattern is that of `refused`."""
    frequency = args.moe_layer_freq
    return frequency.index(1) if isinstance(frequency, list) else 0


def _training(args: Any) -> list[str]:
    recompute = args.recompute_granularity or "none"
    numbers = {
        "seq_length": args.seq_length,
        "micro_batch_size": args.micro_batch_size,
        "global_batch_size": args.global_batch_size,
        "iterations": args.train_iters or args.train_samples // args.global_batch_size,
        "lr": args.lr,
        "min_lr": args.min_lr or 0.0,
        "weight_decay": args.weight_decay,
        "adam_beta1": args.adam_beta1,
        "adam_beta2": args.adam_beta2,
        "adam_eps": args.adam_eps,
        "clip_grad": args.clip_grad,
        "seed": args.seed,
        "precision": "fp16" if args.fp16 else "bf16" if args.bf16 else "fp32",
        "recompute": recompute,
        "distributed_optimizer": args.use_distributed_optimizer,
        "warmup_iterations": 0,
    }
    return [*_overrides("training", numbers), *_NO_RUN]


def _parallel(args: Any) -> list[str]:
    tensor = args.tensor_model_parallel_size
    numbers: dict[str, object] = {
        "tensor": tensor,
        "sequence": args.sequence_parallel if tensor > 1 else "null",
        "pipeline": args.pipeline_model_parallel_size,
        "virtual_pipeline": args.virtual_pipeline_model_parallel_size or 1,
        "context": args.context_parallel_size,
        "unaligned": "accept",
    }
    if args.num_experts:
        expert = args.expert_model_parallel_size
        numbers |= {
            "expert": expert,
            "expert_tensor": args.expert_tensor_parallel_size or tensor,
            "dispatcher": args.moe_token_dispatcher_type if expert > 1 else "allgather",
        }
    return [*_overrides("parallel", numbers), f"launcher.num_processes={args.world_size}"]


def _overrides(section: str, numbers: Mapping[str, object]) -> list[str]:
    return [f"{section}.{key}={_text(value)}" for key, value in numbers.items()]


def _text(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
