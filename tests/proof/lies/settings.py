"""The runs into which faults are planted: schemes, dtypes, paths of attention, models, layouts, kinds of run.

All train one tiny model, three iterations of two micro-batches of two sequences, at a learning rate that changes
quantised weights in every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from tests.conftest import TINY, TINY_MODELS

BASE = [
    *TINY,
    *("capture=off", "training.iterations=3", "training.warmup_iterations=0"),
    *("training.micro_batch_size=2", "training.global_batch_size=4"),
    *("training.lr=3e-3", "training.min_lr=3e-3", "tracking.tensorboard=false"),
    *("launcher.num_threads=1", "launcher.timeout_min=2"),
]
#: Every operand of attention has a format of its own.
_PV_SLOTS = ("dgrad_p.dO", "dgrad_p.v", "dgrad_v.P", "dgrad_v.dO")


def _all_slots(name: str, fmt: str) -> list[str]:
    """Each of the 18 slots in a format, none of them the forward's copy."""
    return [
        *(f"quant=more/FA_full_{name}", f"quant/linear={name}", f"quant/pv={name}"),
        *(f"quant.pv.{slot}.format={fmt}" for slot in _PV_SLOTS),
    ]


class Kind(StrEnum):
    """What a run does."""

    TRAIN = "train"
    #: Goes on after iteration 2, where an honest start was killed; the fault exists after it alone.
    RESUME = "resume"
    #: `quantexp evaluate` of a checkpoint.
    EVALUATE = "evaluate"
    #: `quantexp gradient`: the gradients of one iteration.
    GRADIENT = "gradient"


@dataclass(frozen=True)
class Setting:
    """A run, by its words after `BASE`."""

    words: list[str]
    num_processes: int = 1
    kind: Kind = Kind.TRAIN
    #: Faults that ask for one of these are planted here, besides those that ask for nothing.
    tags: frozenset[str] = field(default_factory=frozenset)


def _of(*words: str, tags: str = "", processes: int = 1, kind: Kind = Kind.TRAIN) -> Setting:
    return Setting(list(words), processes, kind, frozenset(tags.split()))


_MODEL = {name: TINY_MODELS[name] for name in ("mixtral", "deepseek2_lite", "qwen2", "llama31-8b")}
#: Amaxes change by more than a factor of two, and with them the scales of delayed scaling, which are powers of two.
_FAST = ("training.lr=3e-2", "training.min_lr=3e-2", "training.iterations=4")
_HELD_OUT = ("evaluation.samples=4", "dataset.split='50,50,0'")
_SAVED = "checkpoint.optimizer=true", "checkpoint.at_end=true"
_GOES_ON = (*_SAVED, "checkpoint.every=2", "checkpoint.keep_last=2")
_TILED, _FUSED = "training.attention=tiled", "training.attention=fused"
_RULE = "quant.rules=[{iterations: [1, 2], format: bf16}]"
_LAYOUT = ("training.micro_batch_size=1",)

#: The schemes of the first table.
SCHEMES: dict[str, Setting] = {
    "mxfp4": _of("quant=FA_linear_mxfp4"),
    "mxfp8": _of("quant=FA_linear_mxfp8"),
    "hifp8": _of("quant=FA_linear_hifp8"),
    "nvfp4": _of("quant=more/linear_nvfp4"),
    "fp8": _of("quant=more/linear_fp8"),
    "bf16": _of("quant=bf16"),
    "all slots mxfp4": _of(*_all_slots("mxfp4", "mxfp4_e2m1"), tags="all"),
    "all slots fp8": _of(*_all_slots("fp8", "fp8_e4m3"), tags="all"),
    "delayed": _of("quant=more/linear_hifp8_delayed", *_FAST, tags="delayed"),
    "sr rht": _of("quant=more/linear_mxfp4_sr_rht", tags="drawn"),
    "averis": _of("quant=more/linear_nvfp4_averis", tags="parts"),
    "hot channels": _of("quant=more/linear_nvfp4_hot_channels", tags="parts"),
    "outliers": _of("quant=more/linear_mxfp4_outliers", tags="parts"),
    "metis": _of("quant=more/linear_nvfp4_metis", tags="parts low-rank drawn"),
    "smooth k": _of("quant=more/FA_mxint8_smooth_k", tags="parts"),
    "smooth k tiled": _of(
        "quant=more/FA_mxint8_smooth_k", "training.attention=tiled", tags="parts"
    ),
    "norms": _of(
        *("quant=more/linear_mxfp8_floor_norms", "quant.norm.fprop.y.format=mxfp8", *_FAST),
        tags="norm",
    ),
    "fp8 block": _of("quant=more/linear_fp8_block"),
    "mxint8": _of("quant=more/linear_mxint8"),
    "hadamard": _of("quant=more/linear_mxfp4_hadamard"),
    "python": _of(
        "quant=bf16", "quant.linear.format=tests.proof.lies.formats:Ternary", tags="python"
    ),
    "of forward": _of("quant=linear_mxfp4", "quant.linear.of=forward", tags="of-forward"),
    "of stored": _of("quant=more/linear_fp8_block_stored_mxfp4", tags="of-stored"),
    "of stored, of one scale": _of(
        *("quant=more/linear_fp8", "quant.linear.of=nvfp4"), tags="of-stored"
    ),
    "of forward drawn": _of(
        *("quant=more/linear_nvfp4", "quant.linear={of: forward, rounding: stochastic}"),
        "quant.linear.wgrad={g: {hadamard: random}, x: {hadamard: random}}",
        "quant.linear.dgrad={g: {pre_scale: 0.9411764705882353}, w: {pre_scale: 0.8}}",
        "quant.linear.fprop.w.pre_scale=true",
        tags="of-forward",
    ),
    "quartet": _of("quant=more/linear_mxfp4_quartet", tags="of-forward turned clip drawn"),
    "quest": _of("quant=more/linear_mxfp4_quest", tags="turned clip"),
    "of forward attention": _of(
        *("quant=more/FA_full_mxfp4", "quant.qk.of=forward", "quant/pv=mxfp4"),
        *("quant.pv.dgrad_p.v={format: mxfp4, of: forward}", _TILED),
        tags="of-forward",
    ),
    "master": _of("quant=more/adam_fp8_eco", tags="master feedback"),
    "reset": _of(
        *("quant=more/linear_nvfp4_tetrajet_v2_reset", "training.iterations=6"),
        "quant.optimizer.reset={every: 3, over: 1, ratio: 1.2, start: 0}",
        tags="reset",
    ),
    "pull": _of("quant=more/linear_mxfp4_cage", "quant.optimizer.pull.start=0", tags="pull"),
    "smooth": _of("quant=more/smooth_int4", tags="smooth"),
    "estimator": _of("quant=FA_linear_mxfp4", "quant.linear.fprop.w.dge=5", tags="clip estimator"),
    "muon": _of("quant=FA_linear_mxfp4", "training.optimizer=muon", tags="muon"),
    "row sums": _of(
        "quant=bf16",
        "quant.pv={unnormalised: true, max_factor: 2, delta: o}",
        tags="row-sums raised delta",
    ),
    "row sums all slots tiled": _of(
        *(*_all_slots("mxfp4", "mxfp4_e2m1"), _TILED),
        "quant.pv.fprop.P={unnormalised: true, max_factor: 2, delta: o}",
        tags="row-sums raised delta",
    ),
    "clipped": _of("quant=FA_linear_mxfp4", "quant.linear.fprop.x.clip_gradient=true", tags="clip"),
}
#: Other dtypes, attention, models and kinds of run.
VARIANTS: dict[str, Setting] = {
    "mxfp4 fp16": _of(
        *("quant=FA_linear_mxfp4", "training.precision=fp16", "training.initial_loss_scale=1024")
    ),
    "mxfp4 fp32": _of("quant=FA_linear_mxfp4", "training.precision=fp32"),
    "fp8 fp32": _of("quant=more/linear_fp8", "training.precision=fp32"),
    "bf16 fp32": _of("quant=bf16", "training.precision=fp32"),
    "all slots mxfp4 tiled": _of(*_all_slots("mxfp4", "mxfp4_e2m1"), _TILED, tags="all tiled"),
    "all slots fp8 tiled": _of(*_all_slots("fp8", "fp8_e4m3"), _TILED, tags="all tiled"),
    "mxfp8 fused": _of("quant=FA_linear_mxfp8", _FUSED, tags="fused"),
    # Scores of a size at which the quantisation of q and k moves o by more than a rounding of its dtype.
    "mxfp4 fused large scores": _of(
        *("quant=FA_linear_mxfp4", "model.init_std=0.2", _FUSED), tags="fused"
    ),
    "mxfp8 recomputed": _of("quant=FA_linear_mxfp8", "training.recompute=full", tags="recomputed"),
    "sr rht recomputed": _of(
        *("quant=more/linear_mxfp4_sr_rht", "training.recompute=full"), tags="drawn recomputed"
    ),
    "mxfp8 without weight cache": _of("quant=FA_linear_mxfp8", "training.weight_cache=false"),
    "experts mxfp4": _of(*_MODEL["mixtral"], "quant=linear_mxfp4", tags="experts"),
    "experts fp8": _of(*_MODEL["mixtral"], "quant=more/linear_fp8", tags="experts"),
    "latent mxfp8": _of(*_MODEL["deepseek2_lite"], "quant=FA_linear_mxfp8", tags="experts latent"),
    "tied output mxfp8": _of("quant=FA_linear_mxfp8", "quant/output=mxfp8", tags="output tied"),
    "output fp8": _of(
        *_MODEL["llama31-8b"], "quant=more/linear_fp8", "quant/output=fp8", tags="output"
    ),
    "bias mxfp8": _of(*_MODEL["qwen2"], "quant=linear_mxfp8", tags="bias"),
    "rule at 3": _of("quant=FA_linear_mxfp8", _RULE, tags="rule"),
    "validation": _of("quant=FA_linear_mxfp4", *_HELD_OUT, "evaluation.every=1", tags="validation"),
    "resumed": _of("quant=FA_linear_mxfp4", *_GOES_ON, kind=Kind.RESUME, tags="resume saved"),
    "resumed delayed": _of(
        *("quant=more/linear_hifp8_delayed", *_FAST, *_GOES_ON),
        kind=Kind.RESUME,
        tags="resume delayed resumed-delayed",
    ),
    "evaluate": _of(
        *("quant=FA_linear_mxfp4", *_HELD_OUT, "evaluate.only=true"),
        kind=Kind.EVALUATE,
        tags="evaluate",
    ),
    "gradient": _of(
        *("quant=FA_linear_mxfp4", "gradient.only=true", "training.stop_after=1"),
        kind=Kind.GRADIENT,
        tags="gradient",
    ),
}
#: Several processes.
LAYOUTS: dict[str, Setting] = {
    "dp2 mxfp8": _of(
        "quant=FA_linear_mxfp8", *_LAYOUT, *_SAVED, processes=2, tags="ranks data saved"
    ),
    "tp2 fp8": _of(
        *("quant=more/linear_fp8", "parallel.tensor=2", "parallel.sequence=false", *_LAYOUT),
        processes=2,
        tags="ranks tensor",
    ),
    "tp2 sp mxfp4": _of(
        *(*_all_slots("mxfp4", "mxfp4_e2m1"), "parallel.tensor=2", *_LAYOUT),
        processes=2,
        tags="ranks tensor sequence all",
    ),
    "tp2 sp of forward drawn": _of(
        *("quant=more/linear_nvfp4", "quant.linear={of: forward, rounding: stochastic}"),
        *("parallel.tensor=2", *_LAYOUT),
        processes=2,
        tags="ranks of-forward",
    ),
    "tp2 sp of stored": _of(
        *("quant=more/linear_fp8", "quant.linear.of=nvfp4", "parallel.tensor=2", *_LAYOUT),
        processes=2,
        tags="ranks of-stored",
    ),
    "ep2 of stored": _of(
        *(*_MODEL["mixtral"], "quant=linear_mxfp8", "quant.linear.of=nvfp4"),
        *("parallel.expert=2", *_LAYOUT),
        processes=2,
        tags="ranks of-stored",
    ),
    "tp2 sp quartet": _of(
        *("quant=more/linear_mxfp4_quartet", "parallel.tensor=2", "model.ffn_hidden_size=256"),
        *("training.seq_length=128", *_LAYOUT),
        processes=2,
        tags="ranks turned",
    ),
    "ep2 quartet": _of(
        *(*_MODEL["mixtral"], "quant=more/linear_mxfp4_quartet", "parallel.expert=2", *_LAYOUT),
        processes=2,
        tags="ranks turned",
    ),
    "ep2 of forward drawn": _of(
        *(*_MODEL["mixtral"], "quant=linear_mxfp4", "quant.linear.rounding=stochastic"),
        *("quant.linear.of=forward", "parallel.expert=2", *_LAYOUT),
        processes=2,
        tags="ranks of-forward",
    ),
    "tp2 sp sr rht": _of(
        *("quant=more/linear_mxfp4_sr_rht", "parallel.tensor=2", "model.ffn_hidden_size=256"),
        *("training.seq_length=128", *_LAYOUT),
        processes=2,
        tags="ranks tensor sequence drawn",
    ),
    "tp2 sp averis": _of(
        *("quant=more/linear_nvfp4_averis", "parallel.tensor=2", *_LAYOUT),
        processes=2,
        tags="ranks tensor sequence parts",
    ),
    "tp2 sp norms": _of(
        *("quant=more/linear_mxfp8_floor_norms", "quant.norm.fprop.y.format=hifp8", *_FAST),
        *("model.qk_norm=true", "parallel.tensor=2", *_LAYOUT),
        processes=2,
        tags="ranks tensor sequence norm",
    ),
    "pp2 interleaved mxfp8": _of(
        *("quant=FA_linear_mxfp8", "parallel.pipeline=2", "parallel.virtual_pipeline=2"),
        *("model.num_layers=4", *_LAYOUT),
        processes=2,
        tags="ranks pipeline",
    ),
    "pp2 validation mxfp8": _of(
        *("quant=linear_mxfp8", "parallel.pipeline=2", *_HELD_OUT, "evaluation.every=1", *_LAYOUT),
        processes=2,
        tags="ranks pipeline validation",
    ),
    "ep2 mxfp4": _of(
        *(*_MODEL["mixtral"], "quant=linear_mxfp4", "parallel.expert=2", *_LAYOUT),
        processes=2,
        tags="ranks experts expert-ranks",
    ),
    "ep2 mxfp8 all-to-all": _of(
        *(*_MODEL["mixtral"], "quant=linear_mxfp8", "parallel.expert=2"),
        *("parallel.dispatcher=alltoall", *_LAYOUT),
        processes=2,
        tags="ranks experts expert-ranks",
    ),
    # Each expert is shared by two ranks, which get the rows of both.
    "tp2 experts fp8": _of(
        *(*_MODEL["mixtral"], "quant=more/linear_fp8", "parallel.tensor=2"),
        *_LAYOUT,
        processes=2,
        tags="ranks experts",
    ),
    "cp2 mxfp4 tiled": _of(
        *("quant=FA_linear_mxfp4", "parallel.context=2", "training.seq_length=128", _TILED),
        *_LAYOUT,
        processes=2,
        tags="ranks context",
    ),
    "cp2 row sums fp8": _of(
        *(*_all_slots("fp8", "fp8_e4m3"), "parallel.context=2", "training.seq_length=128"),
        *("quant.pv.fprop.P={unnormalised: true, max_factor: 2, delta: o}", _TILED, *_LAYOUT),
        processes=2,
        tags="ranks context row-sums raised delta",
    ),
    "cp2 all slots fp8": _of(
        *(*_all_slots("fp8", "fp8_e4m3"), "parallel.context=2", "training.seq_length=128"),
        *_LAYOUT,
        processes=2,
        tags="ranks context all",
    ),
}
SETTINGS = {**SCHEMES, **VARIANTS, **LAYOUTS}
