"""A training that goes on in new processes from its training state, in the same layout and in others.

Nothing is tolerated: the same layout goes on with the same bits, and another one begins with the same bits.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_runs import Case, Result, run_all
from layouts import LAYOUTS, MODELS
from safetensors import safe_open

from tests.training.megatron.state_plants import NAN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

BF16 = ["training.precision=bf16", "quant=FA_linear_mxfp8"]
DIVIDED = "training.distributed_optimizer=true"
PLANTS = "tests.training.megatron.state_plants"
NO_STEP = f"{PLANTS}:no_step"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SAVED = ["training.iterations=4", "checkpoint.every=2", "checkpoint.optimizer=true"]
FP16 = ["training.precision=fp16", "quant=linear_mxfp8"]
#: A scale at which no gradient overflows, and one at which those of all four iterations do, so that it is halved.
STEPS, OVERFLOW = "training.initial_loss_scale=1024.0", f"training.initial_loss_scale={2.0**24}"
#: The model, the processes, and the words of each run.
RUNS: dict[str, tuple[str, int, list[str]]] = {
    "one": ("llama", 1, BF16),
    "dp2": ("llama", 2, BF16),
    "dp2 distributed": ("llama", 2, [*BF16, DIVIDED]),
    "tp2 sp": ("llama", 2, [*BF16, *LAYOUTS["tp2 sp"][1]]),
    "pp2": ("llama", 2, [*BF16, *LAYOUTS["pp2"][1]]),
    "pp2 interleaved": ("llama", 2, [*BF16, *LAYOUTS["pp2 interleaved"][1]]),
    "cp2": ("llama", 2, [*BF16, *LAYOUTS["cp2"][1]]),
    "ep2": ("deepseek", 2, [*BF16, *LAYOUTS["ep2 alltoall"][1]]),
    "ep2 distributed": ("deepseek", 2, [*BF16, *LAYOUTS["ep2 alltoall"][1], DIVIDED]),
    "dp2 distributed in fp16": ("llama", 2, [*FP16, DIVIDED, STEPS]),
    "dp2 before a first step": ("llama", 2, [*FP16, DIVIDED, OVERFLOW]),
    "pp2 delayed": ("llama", 2, ["quant=more/linear_hifp8_delayed", *LAYOUTS["pp2"][1]]),
    "tp2 random": ("llama", 2, ["quant=more/linear_mxfp4_sr_rht", *LAYOUTS["tp2 sp"][1]]),
    "tp2 dp2 distributed": ("llama", 4, [*BF16, *LAYOUTS["tp2 sp"][1], DIVIDED]),
    "pp2 dp2 distributed": ("llama", 4, [*BF16, *LAYOUTS["pp2"][1], DIVIDED]),
}
FP32 = ["training.precision=fp32", "quant=linear_mxfp8"]
#: A run, and the processes and words of another layout or precision that begins with its state.
OTHERS: list[tuple[str, int, list[str]]] = [
    ("tp2 sp", 1, BF16),
    ("pp2", 2, [*BF16, *LAYOUTS["tp2 sp"][1]]),
    ("dp2 distributed", 1, BF16),
    ("one", 2, [*BF16, DIVIDED]),
    ("tp2 dp2 distributed", 2, [*BF16, *LAYOUTS["pp2"][1]]),
    ("pp2 dp2 distributed", 2, [*BF16, *LAYOUTS["tp2 sp"][1]]),
    ("ep2 distributed", 1, BF16),
    ("dp2 distributed", 2, [*FP32, DIVIDED]),
    ("one", 1, FP16),
]


def words_of(name: str) -> list[str]:
    model, _, words = RUNS[name]
    return [*MODELS[model], *words, *SAVED]


def start_at(folder: Path, iteration: int = 2) -> list[str]:
    return [f"training.start_from={folder}@{iteration}", "training.start_optimizer=true"]


def results_of(cases: list[Case], folder: Path) -> list[Result]:
    results = run_all(cases, folder, 1800)
    for each in results:
        assert isinstance(each, Result), each
    return results  # type: ignore[return-value]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Result]]:
    """Every run of four iterations, each in its folder by number."""
    folder = tmp_path_factory.mktemp("whole") / "cases"
    cases = [Case(words_of(name), number) for name, (_, number, _) in RUNS.items()]
    return folder, dict(zip(RUNS, results_of(cases, folder), strict=True))


def case_of(folder: Path, name: str) -> Path:
    return folder / str(list(RUNS).index(name))


def state_of(run: Path, iteration: int) -> dict[str, torch.Tensor]:
    """Every whole tensor of a training state, by another reader: elements that no file has are NaN."""
    folder = run / "checkpoints" / f"iteration_{iteration:08d}" / "state"
    whole: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            records: dict[str, Any] = json.loads(opened.metadata()["pieces"])
            for key in opened.keys():  # noqa: SIM118
                record = records[key.partition("/")[2]]
                target = whole.setdefault(key, torch.full(record["shape"], torch.nan))
                places = torch.arange(target.numel()).view(record["shape"])
                if record["axis"] is not None:
                    parts = [places.narrow(record["axis"], a, b - a) for a, b in record["ranges"]]
                    places = torch.cat(parts, record["axis"])
                own = places.reshape(-1)[slice(*record["flat"])]
                assert target.view(-1)[own].isnan().all(), f"{key} is there twice"
                target.view(-1)[own] = opened.get_tensor(key).reshape(-1)
    assert whole
    assert not any(x.isnan().any() for x in whole.values())
    return whole


def index_of(run: Path, iteration: int) -> dict[str, Any]:
    file = run / "checkpoints" / f"iteration_{iteration:08d}" / "state" / "state.json"
    index: dict[str, Any] = json.loads(file.read_text())
    return index


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def again(
    undisturbed: tuple[Path, dict[str, Result]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Result], list[Result]]:
    """In new processes: every run after its second iteration; the others, which leave out every step; one not saved."""
    folder, whole = tmp_path_factory.mktemp("again") / "cases", undisturbed[0]
    cases = [Case([*words_of(n), *start_at(case_of(whole, n))], RUNS[n][1]) for n in RUNS]
    cases += [
        Case([*MODELS[RUNS[name][0]], *words, *SAVED, *start_at(case_of(whole, name))], n, NO_STEP)
        for name, n, words in OTHERS
    ]
    cases.append(Case(words_of("dp2 distributed")[: -len(SAVED) + 1], 2))
    results = results_of(cases, folder)
    return folder, dict(zip(RUNS, results, strict=False)), results[len(RUNS) :]


@pytest.fixture(scope="module")
def failed(
    undisturbed: tuple[Path, dict[str, Result]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Three runs on two ranks of which rank 1 fails: to write its file, by a moment that is NaN, to read its file."""
    root = tmp_path_factory.mktemp("failed")
    shutil.copytree(case_of(undisturbed[0], "tp2 sp"), root / "damaged")
    file = (
        root / "damaged" / "checkpoints" / "iteration_00000002" / "state" / "rank00001.safetensors"
    )
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    cases = [
        Case(words_of("tp2 sp"), 2, f"{PLANTS}:no_room_on_rank_1"),
        Case(words_of("tp2 sp"), 2, f"{PLANTS}:nan_on_rank_1"),
        Case([*words_of("tp2 sp"), *start_at(root / "damaged")], 2),
    ]
    assert all(isinstance(each, str) for each in run_all(cases, root / "cases", 1800))
    return root


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (
            0,
            r"(state/rank00001\.safetensors cannot be written \(File too large\); the file would be la"
            r"|File too large: .*state/rank00001\.safetensors)",
        ),
        (
            1,
            rf"iteration_00000002 is not written: 1 of .* values are NaN or Inf in {re.escape(NAN)}; ",
        ),
        (
            2,
            r"state/rank00001\.safetensors is damaged: its content is not what was saved \(first in .*",
        ),
    ],
    ids=["full disk", "NaN", "damaged"],
)
def test_failure_of_a_rank_ends_it_and_rank_0_with_its_words(
    failed: Path, number: int, words: str
) -> None:
    for rank in range(2):
        text = (failed / "cases" / str(number) / f"rank{rank}.txt").read_text()
        assert re.search(rf"Error: .*{words}", text), text
    assert not list((failed / "cases" / str(number)).glob("checkpoints/*"))


@pytest.mark.parametrize("name", RUNS)
def test_training_goes_on_in_new_processes_bit_for_bit(
    undisturbed: tuple[Path, dict[str, Result]],
    again: tuple[Path, dict[str, Result], list[Result]],
    name: str,
) -> None:
    """Losses, norms, weights, moments, main weights, loss scale and amax histories."""
    (folder, whole), (new, results, _) = undisturbed, again
    assert results[name].losses == whole[name].losses[2:]
    assert results[name].grad_norms == whole[name].grad_norms[2:]
    assert equal(results[name].weights, whole[name].weights)
    before, after = (case_of(each, name) for each in (folder, new))
    assert equal(state_of(after, 4), state_of(before, 4))
    assert index_of(after, 4) == index_of(before, 4)


@pytest.mark.parametrize("number", range(len(OTHERS)), ids=lambda number: str(OTHERS[number]))
def test_other_layout_begins_with_the_same_bits(
    undisturbed: tuple[Path, dict[str, Result]],
    again: tuple[Path, dict[str, Result], list[Result]],
    number: int,
) -> None:
    """Moments and main weights; the weights are the main ones in the working dtype, as torch rounds them."""
    name, _, words = OTHERS[number]
    before = state_of(case_of(undisturbed[0], name), 2)
    after = state_of(again[0] / str(len(RUNS) + number), 4)
    assert equal(after, before)
    dtype = next(d for key, d in DTYPES.items() if f"training.precision={key}" in words)
    weights = again[2][number].weights
    rounded = {n: before[f"main/{n}"].to(dtype).float() for n in weights}
    assert equal(weights, rounded)
    assert len(before) == 3 * len(weights)


@pytest.fixture(scope="module")
def unpublished(
    undisturbed: tuple[Path, dict[str, Result]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Result]]:
    """The run on two ranks with tensor parallelism again, without the published form; then others start from both.

    They begin with the weights alone, and leave out every step.
    """
    root = tmp_path_factory.mktemp("unpublished")
    case = Case([*words_of("tp2 sp"), "checkpoint.publish=false"], 2)
    results_of([case], root / "first")
    starts = [case_of(undisturbed[0], "tp2 sp"), root / "first" / "0"]
    layouts: list[tuple[int, list[str]]] = [(1, []), (2, LAYOUTS["pp2"][1])]
    cases = [
        Case([*MODELS["llama"], *BF16, *words, *SAVED, start_at(start)[0]], number, NO_STEP)
        for number, words in layouts
        for start in starts
    ]
    return root, results_of(cases, root / "second")


def test_weights_are_read_from_shards_in_any_layout(
    unpublished: tuple[Path, list[Result]], undisturbed: tuple[Path, dict[str, Result]]
) -> None:
    root, results = unpublished
    first, published = root / "first" / "0", case_of(undisturbed[0], "tp2 sp")
    for folder in (first / "checkpoints").iterdir():
        assert {path.name for path in folder.iterdir()} == {"state", "config.json", "hashes.json"}
    assert equal(state_of(first, 2), state_of(published, 2))
    main = {n.partition("/")[2]: x for n, x in state_of(first, 2).items() if n[:5] == "main/"}
    rounded = {name: x.bfloat16().float() for name, x in main.items()}
    for result in results:
        assert equal(result.weights, rounded)


def test_runs_are_what_their_names_say(undisturbed: tuple[Path, dict[str, Result]]) -> None:
    """fp16 steps in one run and searches its scale in another; the scale follows amaxes of all stages."""
    indices = {name: index_of(case_of(undisturbed[0], name), 4) for name in RUNS}
    assert {name for name, index in indices.items() if index["loss_scale"]} == {
        "dp2 distributed in fp16",
        "dp2 before a first step",
    }
    assert indices["dp2 distributed in fp16"]["loss_scale"]["growth_tracker"] == 4
    assert indices["dp2 before a first step"]["loss_scale"]["scale"] < 2.0**24
    for name, index in indices.items():
        assert index["optimizer_steps"] == (0 if "before" in name else 4)
    layers = {stream.split()[1] for stream in indices["pp2 delayed"]["amax_histories"]}
    assert layers == {"0", "1"}


def test_saving_changes_nothing(
    undisturbed: tuple[Path, dict[str, Result]],
    again: tuple[Path, dict[str, Result], list[Result]],
) -> None:
    saved, plain = undisturbed[1]["dp2 distributed"], again[2][-1]
    assert plain.losses == saved.losses
    assert equal(plain.weights, saved.weights)


def test_weights_are_published_as_the_main_ones_are_rounded(
    undisturbed: tuple[Path, dict[str, Result]],
) -> None:
    """The embedding is published as it is, but for its padding."""
    run = case_of(undisturbed[0], "dp2 distributed")
    with safe_open(run / "checkpoints" / "iteration_00000002" / "model.safetensors", "pt") as file:
        published = file.get_tensor("model.embed_tokens.weight")
    main = state_of(run, 2)["main/embedding.word_embeddings.weight"]
    assert torch.equal(main.bfloat16()[: len(published)], published)


def test_every_element_is_saved_once(undisturbed: tuple[Path, dict[str, Result]]) -> None:
    """Whatever the layout, the files have the size of the whole state, apart from their headers."""
    for name in RUNS:
        folder = case_of(undisturbed[0], name) / "checkpoints" / "iteration_00000002" / "state"
        values = sum(x.numel() * 4 for x in state_of(case_of(undisturbed[0], name), 2).values())
        files = list(folder.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        assert values < size < values + sum(_header(file) for file in files) + 1, name


def _header(file: Path) -> int:
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")
