"""Shared fixtures: a tiny model that keeps every proportion that matters, and a way to run it."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import pytest

# The tests' tensors are small: see quantexp.processes.threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from quantexp.config.cached_loader import cache_files
from quantexp.config.compose import compose
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, now, write_status
from quantexp.schema import Experiment

# A shell has its background commands ignore it, and processes that tests interrupt would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)

#: Two layers with grouped queries; every extent a multiple of 32 but the head dimension's own axis.
TINY = [
    "training=fast",
    "model.num_layers=2",
    "model.hidden_size=128",
    "model.ffn_hidden_size=192",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "model.head_dim=32",
    "training.seq_length=64",
    "training.iterations=2",
    "training.warmup_iterations=1",
    "analysis.auto=false",
    "capture.at_end=false",
]

#: Overrides that make each shipped model tiny, after TINY. DeepSeek: one dense layer and one of experts, two of them
#: shared; heads of unlike widths for keys and values; extents that leave short last blocks.
_EXPERTS = [
    *("model=deepseek2_lite", "model.mla=null", "model.num_query_groups=2", "model.head_dim=32"),
    *("model.moe.num_experts=4", "model.moe.top_k=2", "model.moe.expert_ffn_hidden_size=40"),
    *("model.moe.num_shared_experts=0", "model.moe.norm_topk_prob=true"),
]
TINY_MODELS = {
    "llama32-1b": [],
    "llama31-8b": ["model=llama31-8b", "model.num_query_groups=1"],
    "deepseek2_lite": [
        "model=deepseek2_lite",
        "model.num_query_groups=4",
        "model.head_dim=40",
        "model.mla.kv_lora_rank=48",
        "model.mla.qk_head_dim=24",
        "model.mla.qk_pos_emb_head_dim=16",
        "model.mla.v_head_dim=20",
        "model.moe.num_experts=4",
        "model.moe.top_k=2",
        "model.moe.expert_ffn_hidden_size=40",
    ],
    "qwen2": ["model.qkv_bias=true"],
    "qwen3": ["model.qk_norm=true"],
    "mixtral": [*_EXPERTS, "model.moe.num_dense_layers=0", "model.ffn_hidden_size=40"],
    "qwen3_moe": [*_EXPERTS, "model.qk_norm=true"],
}


pytest_plugins = ["by_file", "slow_tests", "not_run", "attacks", "processes_end"]

TESTS = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs from all tests but those that are asked for by `-m gpu`: a run takes a GPU where it sees one.

    cuBLAS looks once in a process, at its first product, for what deterministic runs need.
    """
    if re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr")):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_finish() -> None:
    """Exclude everything that exists before the first test from garbage collection."""
    gc.freeze()


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the variables of the old scripts and the width of the terminal from tests."""
    for name in ("CUSTOM_QUANT_TYPE", "TENSOR_SAVE_DIR", "TENSOR_SAVE_ENABLED", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _no_idle_process_groups() -> Iterator[None]:
    """Collect the models of earlier trainings: their process groups keep threads that wake a hundred times a second.

    A collection takes longer than most tests, so it happens only after many new threads.
    """
    yield
    if psutil.Process().num_threads() > _threads_left[0] + 50:
        gc.collect()
        _threads_left[0] = psutil.Process().num_threads()


#: Threads that the last collection left.
_threads_left = [50]


@pytest.fixture(scope="session", autouse=True)
def _shipped_configuration_read_once() -> Iterator[None]:
    """Share the files of the shipped configuration, which no test changes, between all compositions."""
    shared: dict[tuple[str, str], bytes] = {}

    def read(loader: Any) -> None:
        cache_files(loader)
        loader.repository.cache = Cache(repr(loader.repository.sources))

    class Cache(dict[tuple[str, str], bytes]):
        def __init__(self, shipped: str) -> None:
            super().__init__(shared)
            self.shipped = shipped

        def __setitem__(self, key: tuple[str, str], value: bytes) -> None:
            super().__setitem__(key, value)
            if key[0] == self.shipped:
                shared[key] = value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantexp.config.compose.cache_files", read)
        yield


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for the prepared sample and index of the whole test run."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def tiny_words(cache: Path) -> list[str]:
    """The overrides that make an experiment tiny, for tests that have their own folders or start a process."""
    return [*TINY, f"paths.cache={cache}"]


@pytest.fixture(scope="session")
def tiny_models() -> dict[str, list[str]]:
    """For each shipped model, the overrides that turn a tiny experiment into it."""
    return TINY_MODELS


@pytest.fixture
def tiny(cache: Path, tmp_path: Path) -> Callable[..., Experiment]:
    """Compose a tiny experiment with more overrides; its runs go below the test's folder."""

    def make(*overrides: str) -> Experiment:
        return compose_tiny(cache, tmp_path / "runs", overrides)

    return make


def compose_tiny(cache: Path, root: Path, overrides: tuple[str, ...]) -> Experiment:
    """Compose a tiny experiment, from the same overrides once in a process if they name no file and no run."""
    if any(re.search(r"/|_from=|^paths\.", word) for word in overrides):
        return compose([*TINY, f"paths.cache={cache}", f"paths.root={root}", *overrides])
    experiment = copy.deepcopy(_composed_once(cache, overrides))
    experiment.paths.root = str(root)
    return experiment


@lru_cache(maxsize=256)
def _composed_once(cache: Path, overrides: tuple[str, ...]) -> Experiment:
    return compose([*TINY, f"paths.cache={cache}", *overrides])


def run_here(experiment: Experiment, expect: int = 0) -> RunDir:
    """Run an experiment in this process, as a worker does, and return its folder."""
    from quantexp.launch.attempt import open_run
    from quantexp.training.worker import Worker

    with open_run(experiment, "cpu", ["test"]) as (folder, _):
        code = Worker(folder.run, experiment).run()
    assert code == expect, folder.run.status.read_text()
    return folder.run


@pytest.fixture
def run_tiny(tiny: Callable[..., Experiment]) -> Callable[..., RunDir]:
    """Run a tiny experiment in this process and return its folder."""

    def run(*overrides: str, expect: int = 0) -> RunDir:
        return run_here(tiny(*overrides), expect)

    return run


@pytest.fixture(scope="module")
def run_tiny_once(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunDir]:
    """Run a tiny experiment whose folder a module's tests only read."""

    def run(*overrides: str) -> RunDir:
        root = tmp_path_factory.mktemp("runs")
        return run_here(compose_tiny(cache, root, overrides))

    return run


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's folder as the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Triton cache for the tests of one module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.fixture(scope="session")
def triton_interpreter() -> Callable[..., AbstractContextManager[Callable[..., Any]]]:
    """Call functions of a module, which may lie in a folder of tests, in Triton's interpreter."""

    @contextmanager
    def interpreting(module: str, folder: str = ".") -> Iterator[Callable[..., Any]]:
        paths = [TESTS.parent, TESTS / folder, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = {
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
        }
        program = str(TESTS / "triton_interpreter.py")
        command = [sys.executable, "-W", "ignore::RuntimeWarning", program, module]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert process.stdin is not None
        assert process.stdout is not None

        def call(name: str, *arguments: object, **attributes: object) -> Any:
            assert process.stdin is not None
            assert process.stdout is not None
            pickle.dump((name, arguments, attributes), process.stdin)
            process.stdin.flush()
            return pickle.load(process.stdout)

        yield call
        process.stdin.close()
        assert process.wait(120) == 0
        process.stdout.close()

    return interpreting


@pytest.fixture
def largest_file() -> Callable[[int], AbstractContextManager[None]]:
    """A context in which the system refuses to write more bytes to any file of this process."""

    @contextmanager
    def limited(num_bytes: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RunDir]:
    """Write a run folder with a status, and as many metrics as it has iterations."""

    def make(
        name: str = "m_d_bf16-00000001", state: State = State.RUNNING, **fields: Any
    ) -> RunDir:
        run = RunDir(tmp_path / "runs" / name)
        run.logs.mkdir(parents=True)
        run.config.write_text("launcher:\n  num_processes: 1\n")
        if "submission" in fields:
            fields = {"launcher": "slurm", **fields}
        status = Status(state, created=now(), iterations=8, **fields)
        write_status(run.status, status)
        lines = [
            {"iteration": i, "loss": 5 - i / 8, "step_time_s": 2.0, "tokens_per_s": 128.0}
            for i in range(1, status.iteration + 1)
        ]
        if lines:
            run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return run

    return make
