"""Whether releases of Python, torch and Megatron-Core change numbers: the table of docs/install.md.

    python benchmarks/releases.py NAME=PYTHON[:OVERLAY] ... [--schemes NAME,..] [--models NAME,..] [--layouts NAME,..]

PYTHON is the interpreter of an environment; OVERLAY is a folder with another release of a package, which goes before
those of the environment (`pip install --no-deps --target OVERLAY megatron-core==VERSION`). Every environment trains the
same small models on the built-in sample for two iterations, with every tensor captured: the schemes on each model in
one process, then one scheme in each layout, then from a checkpoint of the first environment. A cell says whether each
loss, norm, gradient and captured tensor has the bits that it has in the first environment.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import layouts
from layout_runs import Case, run_all
from same_numbers import CUT, CUT_MODEL, of_run

ROOT = Path(__file__).parents[1]
_EXPERTS = [
    *("model=deepseek2_lite", "model.mla=null", "model.num_query_groups=2", "model.head_dim=32"),
    *("model.moe.num_experts=4", "model.moe.top_k=2", "model.moe.expert_ffn_hidden_size=40"),
    *("model.moe.num_shared_experts=0", "model.moe.norm_topk_prob=true"),
]
MODELS = {
    **{name: [f"model={name}", *words] for name, words in CUT_MODEL.items()},
    "qwen3": ["model=llama32-1b", *CUT_MODEL["llama32-1b"], "model.qk_norm=true"],
    "mixtral": [*_EXPERTS, "model.moe.num_dense_layers=0", "model.ffn_hidden_size=40"],
    "qwen3_moe": [*_EXPERTS, "model.qk_norm=true"],
}
SCHEMES = sorted(file.stem for file in (ROOT / "conf" / "quant").glob("*.yaml"))
#: The layouts of the table, each with the models of `layouts` that take it.
LAYOUTS = {
    "tp2 sp": ["llama", "deepseek"],
    "pp2 interleaved": ["llama", "deepseek"],
    "dp2 distributed optimizer": ["llama", "deepseek"],
    "cp2": ["llama"],
    "ep2 alltoall": ["deepseek", "mixtral"],
}
#: The scheme of layouts, and of the run that goes on.
SCHEME = "FA_linear_mxfp8"
_GOES_ON = f"{SCHEME} from the checkpoint of the first"
#: The name of what went wrong, in place of the numbers of a run.
_FAILED = "failed"
_QUIET = ["analysis.auto=false", "tracking.tensorboard=false", "memory=ignore"]

#: Row of the table -> name of a number -> the number, or a hash.
Record = dict[str, dict[str, Any]]


def main() -> None:
    """Record every environment, and print the table; or record this one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("environments", nargs="*", metavar="NAME=PYTHON[:OVERLAY]")
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="of each model")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--folder", type=Path, help="keeps the records, and takes those there")
    parser.add_argument("--record", type=Path, help="record this environment into a file")
    arguments = parser.parse_args()
    schemes, models, kinds = (
        [word for word in words.split(",") if word]
        for words in (arguments.schemes, arguments.models, arguments.layouts)
    )
    if arguments.record:
        record = recorded(schemes, models, kinds, arguments.record.with_name("start"))
        arguments.record.write_text(json.dumps(record, indent=1))
        return
    choice = ["--schemes", arguments.schemes, "--models", arguments.models]
    choice += ["--layouts", arguments.layouts]
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or stack.enter_context(tempfile.TemporaryDirectory())
        records = {}
        for environment in arguments.environments:
            name, _, place = environment.partition("=")
            records[name] = record_of(name, place, Path(folder).resolve(), choice)
    print(table(records))  # noqa: T201
    sys.exit(any(cell != "equal" for row in rows(records)[1:] for cell in row[2:]))


def record_of(name: str, place: str, folder: Path, choice: list[str]) -> Record:
    """The record of an environment, from its file if there is one."""
    file = folder / f"{name.replace('/', '_').replace(' ', '_')}.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        python, _, overlay = place.partition(":")
        paths = [overlay, str(ROOT), str(ROOT / "launchers")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
        }
        command = [python, "-W", "ignore", __file__, "--record", str(file), *choice]
        subprocess.run(command, env=environment, check=True)
    record: Record = json.loads(file.read_text())
    return record


def recorded(schemes: list[str], models: list[str], kinds: list[str], start: Path) -> Record:
    """The numbers of this environment; `start` holds the checkpoint to go on from, written if it is not there."""
    record: Record = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in models:
            for scheme in schemes:
                numbers = record.setdefault(f"{model}, {len(schemes)} schemes", {})
                words = [*MODELS[model], f"quant={scheme}"]
                numbers |= trained(folder / model, folder / "cache", words)
        record[_GOES_ON] = gone_on(folder, start)
        record |= in_layouts(kinds, folder / "layouts")
    return record


def trained(root: Path, cache: Path, words: list[str]) -> dict[str, Any]:
    """Train in this process, and return the numbers of the run; of one that fails, why."""
    from quantexp.config.compose import compose
    from quantexp.launch.attempt import open_run
    from quantexp.training.worker import Worker

    places = [f"paths.root={root}", f"paths.cache={cache}"]
    experiment = compose([*CUT, *_QUIET, *places, *words])
    with open_run(experiment, "cpu", ["releases"]) as (folder, _):
        code = Worker(folder.run, experiment).run()
    run = folder.run.root
    if code:
        return {_FAILED: f"{run.name}: {json.loads(folder.run.status.read_text())['reason']}"}
    return dict(of_run(run))


def gone_on(folder: Path, start: Path) -> dict[str, Any]:
    """The last two of four iterations, after a checkpoint with the optimizer's state."""
    words = [*MODELS["llama32-1b"], f"quant={SCHEME}", "training.iterations=4"]
    if not start.exists():
        saves = ["checkpoint.every=2", "checkpoint.optimizer=true"]
        trained(start, folder / "cache", [*words, *saves])
    (first,) = (file.parent for file in start.glob("*/config.yaml"))
    words += [f"training.start_from={first}@2", "training.start_optimizer=true"]
    return trained(folder / "on", folder / "cache", words)


def in_layouts(kinds: list[str], folder: Path) -> Record:
    """Losses, norms, and hashes of whole gradients and weights, in each layout."""
    cases = {}
    for kind, model in ((each, model) for each in kinds for model in LAYOUTS[each]):
        number, words = layouts.LAYOUTS[kind]
        words = [*layouts.MODELS[model], f"quant={SCHEME}", *words, "training.iterations=2"]
        cases[f"{kind}, {model}"] = Case(words, number)
    record: Record = {}
    for row, result in zip(cases, run_all([*cases.values()], folder), strict=True):
        if isinstance(result, str):
            record[row] = {_FAILED: result}
            continue
        tensors = {f"gradient {name}": x for name, x in result.gradients.items()}
        tensors |= {f"weight {name}": x for name, x in result.weights.items()}
        record[row] = {
            "losses": result.losses,
            "norms": result.grad_norms,
            **{name: _digest(x) for name, x in tensors.items()},
        }
    return record


def _digest(x: Any) -> str:
    return hashlib.sha256(x.contiguous().float().numpy().tobytes()).hexdigest()[:16]


def rows(records: dict[str, Record]) -> list[list[str]]:
    """The table's cells, the first row its header."""
    names = list(records)
    first = records[names[0]]
    cells = [["", *names]]
    for row, expected in first.items():
        others = (records[name].get(row, {}) for name in names[1:])
        size = _FAILED if _FAILED in expected else f"{len(expected):,} values"
        cells.append([row, size, *(_cell(expected, own) for own in others)])
    return cells


def _cell(expected: dict[str, Any], own: dict[str, Any]) -> str:
    if not own:
        return "not run"
    if _FAILED in own:
        return _FAILED
    keys = expected.keys() | own.keys()
    wrong = sum(expected.get(key) != own.get(key) for key in keys)
    return f"{wrong} of {len(keys)} differ" if wrong else "equal"


def table(records: dict[str, Record]) -> str:
    """The table in Markdown."""
    return "\n".join(_lines(rows(records)))


def _lines(cells: list[list[str]]) -> Iterator[str]:
    yield "| " + " | ".join(cells[0]) + " |"
    yield "|---" * len(cells[0]) + "|"
    for row in cells[1:]:
        yield "| " + " | ".join(row) + " |"


if __name__ == "__main__":
    main()
