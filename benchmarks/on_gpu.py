"""Everything of quantexp that waits for a GPU, in the order of its worth, in one command.

    python benchmarks/on_gpu.py [--minutes 9] [--out on_gpu] [--only PART ...] [--skip-done on_gpu/on_gpu.json]
                                [--wheels FOLDER] [--device cpu]

Each part (`gpu_parts.py`) runs in a process of its own, so that none loses what others found. After each case the
results so far are written: OUT/on_gpu.json, the same as tables in OUT/on_gpu.md, and what the parts printed in
OUT/on_gpu.log. A part ends at its limit or at the end of the time. With `--skip-done` a later call completes them: it
runs the cases that have no result there.

On a machine without a package index, `--wheels` takes what is missing from a folder of `gpu_wheels.sh`, into an
environment that has the packages of this Python too. `--device cpu` runs what a CPU can at sizes that only show that
the program works.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu_parts import PARTS, ROOT, CaseFailedError, Part, Setting
from gpu_results import Results, clocks

#: Seconds: below this no further part begins; between two looks; until a part that was asked to end is killed.
_LEAST_S, _LOOK_S, _GRACE_S = 15.0, 1.0, 5.0
_TITLES = {part.name: part.title for part in PARTS}


def main() -> int:
    """Run the parts; returns 1 if a case failed or is missing."""
    arguments = _arguments()
    if arguments.wheels:
        return _again_with(Path(arguments.wheels).resolve())
    if arguments.part:
        _run_part(arguments)
        return 0
    if arguments.device == "cuda":
        _require_device()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = Results.earlier(arguments.skip_done)
    results.write(arguments.out, _TITLES)
    deadline = time.monotonic() + 60 * arguments.minutes
    with _ending_in_order():
        for part in PARTS:
            if not arguments.only or part.name in arguments.only:
                _watch(part, results, deadline, arguments)
    sys.stdout.write((arguments.out / "on_gpu.md").read_text())
    return int(any(part["status"] != "done" for part in results.parts.values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Everything that waits for a GPU.")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=Path("on_gpu"))
    parser.add_argument("--only", nargs="+", choices=list(_TITLES), metavar="PART")
    parser.add_argument("--skip-done", type=Path, metavar="JSON")
    parser.add_argument("--wheels", metavar="FOLDER")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--part", choices=list(_TITLES), help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _require_device() -> None:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device; --device cpu tries this program without one")


def _again_with(wheels: Path) -> int:
    """Run this command in an environment that takes from the wheels what this Python lacks."""
    with tempfile.TemporaryDirectory() as folder:
        python = _environment(Path(folder), wheels)
        return subprocess.run([python, *sys.argv, "--wheels="], check=False).returncode


def _environment(folder: Path, wheels: Path) -> str:
    """A virtual environment with this Python's packages, the wheels that are missing, and this checkout."""
    venv.create(folder, with_pip=False)
    python = str(folder / "bin" / "python")
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", query], capture_output=True, text=True, check=True)
    here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    Path(site.stdout.strip(), "packages_of_the_machine.pth").write_text("\n".join(here) + "\n")
    pip = str(next(wheels.glob("pip-*.whl")) / "pip")
    install = [python, pip, "install", "--quiet", "--no-index", "--find-links", str(wheels)]
    # Not in an environment of the build's own, which would lack the packages of this Python.
    subprocess.run([*install, "editables", "hatchling"], check=True)
    subprocess.run([*install, "--no-build-isolation", "--editable", f"{ROOT}[gpu]"], check=True)
    return python


def _watch(part: Part, results: Results, deadline: float, arguments: argparse.Namespace) -> None:
    """Run a part in a process of its own until it ends, or its time does."""
    if results.parts.get(part.name, {}).get("status") == "done":
        return
    remaining = min(part.limit_s, deadline - time.monotonic())
    if remaining < _LEAST_S:
        results.add(part.name, "not begun", 0.0, [])
        results.write(arguments.out, _TITLES)
        return
    begun = time.monotonic()
    sys.stdout.write(f"{part.title}: at most {remaining:.0f} s\n")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        lines = Path(folder) / "cases.jsonl"
        lines.touch()

        def record(status: str) -> None:
            cases = [json.loads(line) for line in lines.read_text().splitlines()]
            results.add(part.name, status, time.monotonic() - begun, cases)
            results.write(arguments.out, _TITLES)

        with _process(part, lines, arguments) as process:
            code = _wait(process, begun + remaining, lambda: record("cut off"))
        record("cut off")
        result = results.parts[part.name]
        result["clocks after"] = clocks()
        has_failed = code != 0 or any("error" in case for case in result["cases"].values())
        record("cut off" if code is None else "failed" if has_failed else "done")


@contextlib.contextmanager
def _process(
    part: Part, lines: Path, arguments: argparse.Namespace
) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a part, which ends, with all that it started, at the end of the block."""
    own = [str(ROOT), str(ROOT / "launchers"), str(ROOT / "benchmarks")]
    path = os.pathsep.join([*own, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    environment |= part.environment if arguments.device == "cpu" else {}
    command = [sys.executable, "-W", "ignore", __file__, "--part", part.name, "--lines", str(lines)]
    command += ["--device", arguments.device]
    command += ["--skip-done", str(arguments.out / "on_gpu.json")]
    with (arguments.out / "on_gpu.log").open("ab") as log:
        log.write(f"== {part.title}\n".encode())
        log.flush()
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        for number, patience_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)


def _wait(process: subprocess.Popen[bytes], until: float, look: Callable[[], None]) -> int | None:
    """The exit code; None if the time ended first. Looks at the results meanwhile."""
    while time.monotonic() < until:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_LOOK_S)
        look()
    return None


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """SIGTERM ends this program through its `finally` clauses."""

    def end(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run_part(arguments: argparse.Namespace) -> None:
    """Run the cases of a part that have no result yet, and write a line for each."""
    part = next(part for part in PARTS if part.name == arguments.part)
    known = json.loads(arguments.skip_done.read_text()) if arguments.skip_done.exists() else {}
    done = Results({}, known.get("parts", {})).done(part.name)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name, case in part.cases(Setting(arguments.device, Path(folder))):
            if name not in done:
                _record(arguments.lines, name, case)


def _record(lines: Path, name: str, case: Callable[[], list[dict[str, Any]]]) -> None:
    sys.stdout.write(f"-- {name}\n")
    result: dict[str, Any] = {"case": name}
    start = time.perf_counter()
    try:
        result["rows"] = case()
    except CaseFailedError as error:
        result |= {"rows": error.rows, "error": str(error)}
    except Exception:  # noqa: BLE001  (the other cases go on)
        result["error"] = traceback.format_exc()[-6000:]
        sys.stdout.write(result["error"])
    result["seconds"] = time.perf_counter() - start
    with lines.open("a") as file:
        file.write(json.dumps(result, default=str) + "\n")


if __name__ == "__main__":
    sys.exit(main())
