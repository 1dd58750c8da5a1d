"""Every layout against one process: the loss, the norm and each gradient of the first step, the weights after some.

    python benchmarks/layouts.py [--models llama,deepseek] [--schemes NAME,...] [--layouts NAME,...] [--precision fp32]

Each run trains a small model (2 layers, hidden size 64, initial std 0.1) on the built-in sample, in processes of this
machine over gloo, and stores its gradients by global name. The worst relative error, |a - b| / |b| in the 2-norm of a
parameter, is what layouts are compared by; the model and the batch are the same in all of them. In fp32 the errors of a
sound layout are those of another order of sums, some 1e-7; in bf16 rounding between the layers hides an unsound one.

An element of an operand that lies within such an error of the boundary between two grid points may be rounded to the
other one. Quantised layers enlarge such a difference, to 1e-2 a few layers on. It is a matter of chance, so each layout
has three seeds. An unsound layout is unsound for every seed.

In the tables loss and norm are the largest of a row, each in its best seed; the other columns have a scheme's worst
gradient in the best seed, and in parentheses that of the worst seed, if an element changed sides there.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layout_runs import Case, Result, run_all

MODELS = {
    "llama": ["model=llama32-1b"],
    "llama-untied": ["model=llama31-8b"],
    "deepseek": [
        *("model=deepseek2_lite", "model.num_query_groups=4", "model.head_dim=48"),
        *("model.mla.kv_lora_rank=112", "model.mla.qk_head_dim=32"),
        *("model.mla.qk_pos_emb_head_dim=16", "model.mla.v_head_dim=32"),
        *("model.moe.num_experts=4", "model.moe.top_k=2", "model.moe.expert_ffn_hidden_size=64"),
        *("model.moe.num_dense_layers=1",),
    ],
}
#: Latent attention for queries too, without experts, so that tensor parallelism without sequence parallelism exists.
MODELS["latent"] = [*MODELS["deepseek"], "model.moe=null", "model.mla.q_lora_rank=64"]
#: Biases; norms of heads; experts without latent attention, as Mixtral and Qwen3-MoE have them.
MODELS["qwen2"] = [*MODELS["llama-untied"], "model.qkv_bias=true"]
MODELS["qwen3"] = [*MODELS["llama-untied"], "model.qk_norm=true"]
_EXPERTS = [
    *("model=deepseek2_lite", "model.mla=null", "model.num_query_groups=2", "model.head_dim=16"),
    *("model.moe.num_experts=4", "model.moe.top_k=2", "model.moe.expert_ffn_hidden_size=64"),
    *("model.moe.num_shared_experts=0", "model.moe.norm_topk_prob=true"),
]
MODELS["mixtral"] = [*_EXPERTS, "model.moe.num_dense_layers=0", "model.ffn_hidden_size=64"]
MODELS["qwen3-moe"] = [*_EXPERTS, "model.qk_norm=true"]
SCHEMES = [
    *("bf16", "linear_mxfp4", "FA_linear_mxfp8", "linear_hifp8", "more/FA_full_mxfp8"),
    *("more/linear_mxfp4_sr_rht", "more/linear_hifp8_delayed", "FA_pv_linear_mxfp4_sr"),
]
_PV_BACKWARD = ("dgrad_p.dO", "dgrad_p.v", "dgrad_v.P", "dgrad_v.dO")
#: Schemes that are not shipped: every slot in mxfp4, rounded stochastically.
WORDS = {
    "FA_pv_linear_mxfp4_sr": [
        *("quant=more/FA_full_mxfp4", "quant/linear=mxfp4", "quant/pv=mxfp4"),
        *(f"quant.pv.{slot}.format=mxfp4" for slot in _PV_BACKWARD),
        *(f"quant.{site}.rounding=stochastic" for site in ("linear", "qk", "pv")),
    ],
}
WORDS["FA_pv_linear_mxfp4_sr_tiled"] = [
    *WORDS["FA_pv_linear_mxfp4_sr"],
    "training.attention=tiled",
]
_LONG = "training.seq_length=256"  # half a chunk is a Hadamard block
_DEEP = "model.num_layers=4"
#: The processes and the words of each layout.
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "dp2": (2, []),
    "dp2 distributed optimizer": (2, ["training.distributed_optimizer=true"]),
    "tp2": (2, ["parallel.tensor=2", "parallel.sequence=false"]),
    "tp2 sp": (2, ["parallel.tensor=2"]),
    "pp2": (2, ["parallel.pipeline=2"]),
    "pp2 interleaved": (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2", _DEEP]),
    "cp2": (2, ["parallel.context=2", _LONG]),
    "ep2 allgather": (2, ["parallel.expert=2"]),
    "ep2 alltoall": (2, ["parallel.expert=2", "parallel.dispatcher=alltoall"]),
    "tp2 sp ep2": (4, ["parallel.tensor=2", "parallel.expert=2"]),
    "tp2 sp ep2 alltoall": (
        4,
        ["parallel.tensor=2", "parallel.expert=2", "parallel.dispatcher=alltoall"],
    ),
    "tp2 pp2": (4, ["parallel.tensor=2", "parallel.pipeline=2"]),
    "tp2 cp2": (4, ["parallel.tensor=2", "parallel.context=2", _LONG]),
    "dp2 tp2": (4, ["parallel.tensor=2"]),
}
#: Layouts that need experts, and one that experts exclude: tensor without sequence parallelism.
_WITH_EXPERTS = frozenset(name for name in LAYOUTS if "ep2" in name)
_WITHOUT_EXPERTS = frozenset({"tp2"})
_MODELS_WITH_EXPERTS = ("deepseek", "mixtral", "qwen3-moe")
#: The seeds of a table's rows.
SEEDS = (1, 2, 3)


def exists(model: str, scheme: str, layout: str) -> bool:
    """Whether a model under a scheme can have a layout."""
    has_experts = model in _MODELS_WITH_EXPERTS
    if "sr_rht" in scheme and has_experts and "tp2" in layout:
        return False  # parts end within Hadamard blocks
    if "cp2" in layout and has_experts:
        return "linear" not in scheme  # the router parts an expert's tokens otherwise
    return layout not in (_WITHOUT_EXPERTS if has_experts else _WITH_EXPERTS)


def reference(words: list[str]) -> list[str]:
    """The words of a layout that one process has, too: its sizes."""
    return [word for word in words if word.startswith(("model.", "training.seq_length"))]


@dataclass(frozen=True)
class Difference:
    """A layout beside one process; each number is a relative error."""

    #: Of the first step, and of the worst.
    first_loss: float
    loss: float
    #: Of the first step.
    grad_norm: float
    gradient: float
    weight: float
    #: The parameter with the worst gradient.
    worst: str


def difference(layout: Result, one: Result) -> Difference:
    """A layout's result beside that of one process.

    Raises:
        RuntimeError: the two have different parameters, or a part of one is missing.
    """
    import torch

    def relative(a: Any, b: Any) -> float:
        a, b = a.double(), b.double()
        if torch.equal(a, b):  # both are zero for an expert without tokens
            return 0.0
        return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))

    if layout.gradients.keys() != one.gradients.keys():
        raise RuntimeError("the layouts have different parameters")
    errors = {n: relative(layout.gradients[n], one.gradients[n]) for n in one.gradients}
    if any(error != error for error in errors.values()):
        raise RuntimeError(
            f"a part of these is missing: {[n for n, e in errors.items() if e != e]}"
        )
    worst = max(errors, key=lambda name: errors[name])
    return Difference(
        abs(layout.losses[0] / one.losses[0] - 1),
        max(abs(a / b - 1) for a, b in zip(layout.losses, one.losses, strict=True)),
        abs(layout.grad_norms[0] / one.grad_norms[0] - 1),
        errors[worst],
        max(relative(layout.weights[n], one.weights[n]) for n in one.weights),
        worst,
    )


def main() -> None:
    """Print the table, or be one rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default="llama,deepseek")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--words", default="", help="more overrides, with spaces between")
    arguments = parser.parse_args()
    base = [f"training.precision={arguments.precision}", *arguments.words.split()]
    for model in arguments.models.split(","):
        table: dict[tuple[str, str, str], list[Difference | str]] = {}
        for scheme in arguments.schemes.split(","):
            names = [n for n in arguments.layouts.split(",") if exists(model, scheme, n)]
            with tempfile.TemporaryDirectory() as work:
                rows = [(model, scheme, name) for name in names]
                table |= differences(rows, Path(work), base, timeout_s=3600)
            one = {row: each for row, each in table.items() if row[1] == scheme}
            sys.stderr.write(matrix(model, one) + "\n")
        sys.stdout.write(matrix(model, table) + "\n\n")
        sys.stdout.flush()


def matrix(model: str, table: dict[tuple[str, str, str], list[Difference | str]]) -> str:
    """A model's table: a row for each layout, a column for each scheme."""
    schemes = list(dict.fromkeys(scheme for _, scheme, _ in table))
    heads = [model, "loss", "norm", *schemes]
    lines = [heads, ["---"] * len(heads)]
    for name in dict.fromkeys(name for *_, name in table):
        own = {
            scheme: table[model, scheme, name]
            for scheme in schemes
            if (model, scheme, name) in table
        }
        best = [b for by_seed in own.values() if (b := _best(by_seed)) is not None]
        worst = [
            max(getattr(b, key) for b in best) if best else float("nan")
            for key in ("first_loss", "grad_norm")
        ]
        lines.append([name, *map(_number, worst), *(_cell(own.get(scheme)) for scheme in schemes)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _best(by_seed: list[Difference | str]) -> Difference | None:
    """The seed with the smallest error; None if a seed failed."""
    sound = [each for each in by_seed if isinstance(each, Difference)]
    return min(sound, key=lambda each: each.gradient) if len(sound) == len(by_seed) else None


def _cell(by_seed: list[Difference | str] | None) -> str:
    """The worst gradient of the best seed, and of the worst seed if that is of another kind."""
    if by_seed is None:
        return ""
    if (best := _best(by_seed)) is None:
        failure = next(each for each in by_seed if isinstance(each, str))
        return f"failed: {failure.strip().splitlines()[-1]}"
    worst = max(each.gradient for each in by_seed if isinstance(each, Difference))
    return _number(best.gradient) + (f" ({_number(worst)})" if worst > 10 * best.gradient else "")


def _number(x: float) -> str:
    return f"{x:.0e}" if x else "0"


def differences(
    rows: list[tuple[str, str, str]],
    folder: Path,
    more: list[str],
    seeds: tuple[int, ...] = SEEDS,
    plants: dict[tuple[str, str, str], str] | None = None,
    timeout_s: float = 800,
) -> dict[tuple[str, str, str], list[Difference | str]]:
    """Rows of model, scheme and layout beside one process, for each seed; a failure is its message."""
    cases: dict[tuple[Any, ...], Case] = {}
    pairs: dict[tuple[str, str, str], list[tuple[Any, Any]]] = {}
    for row in rows:
        model, scheme, name = row
        number, words = LAYOUTS[name]
        for seed in seeds:
            words_of_scheme = WORDS.get(scheme, [f"quant={scheme}"])
            base = [*MODELS[model], *words_of_scheme, f"training.seed={seed}", *more]
            one = (model, scheme, seed, *reference(words))
            cases.setdefault(one, Case([*base, *reference(words)], 1))
            cases[row, seed] = Case([*base, *words], number, (plants or {}).get(row, ""))
            pairs.setdefault(row, []).append(((row, seed), one))
    results = dict(zip(cases, run_all(list(cases.values()), folder, timeout_s), strict=True))
    return {
        row: [_beside(results[own], results[one]) for own, one in keys]
        for row, keys in pairs.items()
    }


def _beside(layout: Result | str, one: Result | str) -> Difference | str:
    if isinstance(one, str):
        return f"in one process: {one}"
    return layout if isinstance(layout, str) else difference(layout, one)


if __name__ == "__main__":
    main()
