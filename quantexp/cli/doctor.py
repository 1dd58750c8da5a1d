"""`quantexp doctor`: what this machine can run, and what prevents the rest."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from quantexp import __version__
from quantexp.cli.output import print_json
from quantexp.config.choices import choice_files
from quantexp.extra import Service, service
from quantexp.folders import cache_dir, conf_dir
from quantexp.processes.machine import host_memory_gb
from quantexp.terminal.close_matches import one_of
from quantexp.terminal.console import output_console
from quantexp.terminal.facts import Facts

#: The resident set of a process after all imports (docs/benchmarks.md).
_IMPORTS_GB = 0.35


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    #: None: a matter of taste or an extra; False: quantexp cannot run until it is mended.
    ok: bool | None
    result: str


def run(arguments: argparse.Namespace) -> int:
    """Print the checks; returns 0, or 1 if quantexp cannot run."""
    looked_at = checks()
    if arguments.json:
        print_json(record(looked_at))
    else:
        show(looked_at, output_console())
    return 0 if record(looked_at)["ok"] else 1


def checks() -> list[Check]:
    """All checks, the most basic first."""
    looks: list[Callable[[], Check]] = [
        _python,
        _torch,
        _device,
        _numerics,
        _compiled,
        _products,
        _transformer_engine,
        _megatron,
        _submitit,
        _memory,
        _configuration,
        _cache,
        _disk,
    ]
    return [look() for look in looks]


def _python() -> Check:
    return Check(
        "quantexp",
        True,
        f"{__version__} on Python {platform.python_version()}, {platform.machine()}",
    )


def _torch() -> Check:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check(
            "torch", False, f"cannot be imported: {error}; pip install -c constraints.txt torch"
        )
    return Check("torch", True, f"{torch.__version__}, {torch.get_num_threads()} threads")


def _device() -> Check:
    try:
        import torch
    except (ImportError, OSError):
        return Check("device", None, "not looked at: torch cannot be imported")
    if not torch.cuda.is_available():
        return Check("device", True, f"CPU ({os.cpu_count()} cores); no CUDA device")
    from quantexp.formats.kernels import gpu

    properties = torch.cuda.get_device_properties(0)
    obstacle = gpu.obstacle(torch.device("cuda", 0))
    how = "Triton" if obstacle is None else f"torch, many times slower: {obstacle}"
    return Check(
        "device",
        True,
        f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory / 1e9:.0f} GB, compute "
        f"capability {properties.major}.{properties.minor}; tensors are quantised, and attention in tiles multiplied, "
        f"by {how}",
    )


def _numerics() -> Check:
    from quantexp.formats.certificate import State, standing

    try:
        import torch
    except (ImportError, OSError):
        return Check("numerics", None, "not looked at: torch cannot be imported")
    known = standing(cache_dir(None), "cuda" if torch.cuda.is_available() else "cpu")
    ok = {State.VERIFIED: True, State.FAILED: False}.get(known.state)
    return Check("numerics", ok, known.words)


def _compiled() -> Check:
    try:
        from quantexp.capture.statistics import native
        from quantexp.formats.kernels import cpu
    except (ImportError, OSError):
        return Check("compiled code", None, "not looked at: torch cannot be imported")
    from quantexp.compiled import compiled

    builds = [(compiled(module.SOURCE), module.SLOWER) for module in (cpu, native)]
    missing = [(build, slower) for build, slower in builds if not build.library]
    if missing:
        reasons = dict.fromkeys(build.words for build, _ in missing)
        words = "; ".join([*reasons, *(slower for _, slower in missing)])
        return Check("compiled code", None, words)
    quantising = builds[0][0]
    assert quantising.library is not None
    how = cpu.Compiled(quantising.library).words
    words = f"{quantising.words}: quantisation ({how}), statistics"
    return Check("compiled code", True, words)


def _products() -> Check:
    """Which kernels multiply 16-bit matrices on the CPU, and how fast."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError):
        return Check("CPU products", None, "not looked at: torch cannot be imported")
    from quantexp.launch.machine_rates import measured_rates, rate_in_words
    from quantexp.runs.device import multiplies_natively
    from quantexp.schema import Precision

    words = []
    for precision in (Precision.bf16, Precision.fp16):
        rates = measured_rates(precision, "cpu", cache_dir(None))
        assert rates is not None, "a CPU has memory"
        rate = rate_in_words(rates.gflop_per_s)
        how = "torch's kernel" if multiplies_natively(precision) else "through fp32"
        words.append(f"{precision.value} {how}, {rate}")
    return Check("CPU products", True, "; ".join(words))


def _transformer_engine() -> Check:
    import importlib.util

    from quantexp.training.megatron.without_te import hide_broken_te

    if importlib.util.find_spec("transformer_engine") is None:
        words = "not installed; for quant.backend=transformer_engine alone (extra: quantexp[te])"
        return Check("transformer-engine", None, words)
    broken = hide_broken_te()
    if broken is not None:
        return Check("transformer-engine", None, f"installed but broken, left out: {broken}")
    support_in_words = service(Service.BACKEND_SUPPORT)
    if support_in_words is None:
        return Check(
            "transformer-engine", None, "not used: the extra transformer_engine is not installed"
        )
    return Check("transformer-engine", None, support_in_words())


def _megatron() -> Check:
    from quantexp.training.megatron.without_te import megatron_version

    try:
        return Check("megatron-core", True, megatron_version())
    except (ImportError, RuntimeError, OSError) as error:
        return Check("megatron-core", False, f"cannot be imported: {error}")


def _submitit() -> Check:
    if shutil.which("sbatch") is None:
        return Check("SLURM", None, "no sbatch on the PATH: runs stay on this machine")
    return Check("SLURM", None, f"sbatch at {shutil.which('sbatch')}")


def _memory() -> Check:
    """Free memory, and what the quick test of each model takes; too little for the smallest is a failure."""
    import psutil

    free = min(psutil.virtual_memory().available / 1e9, host_memory_gb())
    needed = quick_test_gb()
    each = ", ".join(f"{gb:.1f} GB with {name}" for name, gb in needed.items())
    words = f"{free:.1f} GB free; training=fast takes {each}"
    if too_large := [name for name, gb in needed.items() if gb > free]:
        words += f"; too little for {one_of(too_large)}"
    return Check("memory", len(too_large) < len(needed) and None, words)


def quick_test_gb() -> dict[str, float]:
    """GB (1e9 bytes) that `training=fast` takes on a CPU with each shipped model, the smallest first."""
    from quantexp.config.compose import compose
    from quantexp.memory.room import needed_gb

    words = ["training=fast", "quant=FA_linear_mxfp8", "launcher.gpus_per_node=0"]
    models = choice_files("model", None)
    needed = {name: needed_gb(compose([f"model={name}", *words], None, {})) for name in models}
    return {name: _IMPORTS_GB + gb for name, gb in sorted(needed.items(), key=itemgetter(1))}


def _configuration() -> Check:
    there = (conf_dir() / "config.yaml").is_file()
    return Check("configuration", there, str(conf_dir()))


def _cache() -> Check:
    folder = cache_dir(None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Check("cache", False, f"{folder} cannot be written: {error}; set paths.cache=FOLDER")
    return Check("cache", True, str(folder))


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    return Check("disk", None, f"{free:.1f} GB free in {Path.cwd()}")


def record(results: list[Check]) -> dict[str, object]:
    """The output of `doctor --json`."""
    return {"ok": all(c.ok is not False for c in results), "checks": [asdict(c) for c in results]}


def show(results: list[Check], console: Console) -> None:
    """Print the checks as a table."""
    facts = Facts(console)
    marks = {True: "[green]ok[/]", None: "[dim]--[/]", False: "[red]no[/]"}
    for check in results:
        facts.add_row(f"{marks[check.ok]}  {check.name}", escape(check.result))
    facts.print()
