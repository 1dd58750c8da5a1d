"""Ranks from a warm process: its forks are like cold workers in environment, log, open files, signals and ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from quantexp_launchers.local import warm
from quantexp_launchers.local.warm import WarmRank, WarmStart

from quantexp.processes.with_parent import COMMAND, PARENT
from quantexp.runs.fencing import START

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux starts warm")

#: The warm process with a worker that is not a real one: it imports nothing, and does what its folder says.
SERVER = """\
import os, runpy, signal, sys, time, types
from quantexp_launchers.local import warm
from quantexp.training import drawing

class Worker(types.ModuleType):
    def main(self, words):
        return runpy.run_path(words[0] + "/worker.py")["main"](words)

sys.modules[warm.WORKER] = Worker(warm.WORKER)
warm.fork_early = lambda own, show_as: None
warm._IMPORTS = ()
import quantexp.formats.kernels
sys.modules["quantexp.training.megatron.without_te"] = without_te = types.ModuleType("without_te")
without_te.import_megatron = lambda: None
import quantexp.training.megatron
quantexp.training.megatron.without_te = without_te
warm.main(int(sys.argv[1]))
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., WarmRank]]:
    """Starts a rank that runs this code, in its folder; the environment is that of the tests, and more."""
    server = tmp_path / "server.py"
    server.write_text(SERVER)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {server} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(warm, "has_driver", lambda: False)
    monkeypatch.setattr(sys, "executable", str(python))
    one = WarmStart()
    starting = {**os.environ, PARENT: str(os.getpid()), COMMAND: str(os.getpid())}
    words = [str(python), "-m", warm.WORKER, str(tmp_path)]
    (tmp_path / "log").touch()
    with (tmp_path / "log").open("ab") as log:
        assert one.start(words, starting, [log.fileno()]) is None, "the first run starts cold"

        def rank(
            code: str,
            *more: str,
            fds: tuple[int, ...] = (),
            patience_s: float = 60,
            **variables: str,
        ) -> WarmRank:
            (tmp_path / "worker.py").write_text(f"import os, signal, sys, time\n{code}")
            end = time.monotonic() + patience_s
            while time.monotonic() < end:
                environment = starting | variables
                made = one.start([*words, *more], environment, [log.fileno(), *fds])
                if made is not None:
                    return made
                time.sleep(0.02)
            raise TimeoutError

        yield rank
    one.close()


def printed(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


def is_printed(folder: Path, num_lines: int) -> bool:
    return len(printed(folder)) == num_lines


def until(is_true: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_rank_has_its_arguments_environment_log_and_exit_code(
    start: Callable[..., WarmRank], tmp_path: Path
) -> None:
    code = f"""
def main(words):
    print(words, sys.argv, os.environ.get("{START}"), os.environ["{PARENT}"] == str(os.getppid()))
    print(os.environ["{COMMAND}"], os.getpgid(0), os.getcwd(), sys.stdin.read(), flush=True)
    return 7
"""
    for claim in ("a", "b"):
        rank = start(code, "--with-parent", **{START: claim})
        assert rank.wait() == rank.returncode == 7
    arguments = [str(tmp_path), "--with-parent"]
    for claim, first, second in zip(
        "ab", printed(tmp_path)[::2], printed(tmp_path)[1::2], strict=True
    ):
        assert first == f"{arguments} {[warm.WORKER, *arguments]} {claim} True"
        assert second.split() == [str(os.getpid()), str(os.getpgid(0)), str(Path.cwd())]


def test_rank_that_quantises_keeps_its_threads(
    start: Callable[..., WarmRank], tmp_path: Path
) -> None:
    code = """
def main(words):
    import torch
    from quantexp.formats import quantise
    torch.set_num_threads(2)  # launcher.num_threads
    quantise(torch.ones(1 << 18), "mxfp8")
    print(torch.get_num_threads(), flush=True)
    return 0
"""
    assert start(code).wait() == 0
    assert printed(tmp_path) == ["2"]


def test_rank_is_found_by_its_command_line(start: Callable[..., WarmRank], tmp_path: Path) -> None:
    rank = start("main = lambda words: time.sleep(600)")
    expected = [sys.executable, "-m", warm.WORKER, str(tmp_path)]
    until(lambda: list(filter(None, psutil.Process(rank.pid).cmdline())) == expected)
    rank.terminate()
    assert rank.wait() == -signal.SIGTERM, "a warm process ignores signals that end a rank"


def test_requested_files_stay_open_in_the_rank_alone(start: Callable[..., WarmRank]) -> None:
    read_end, write_end = os.pipe()
    rank = start("main = lambda words: time.sleep(0.5)", fds=(write_end,))
    os.close(write_end)
    os.set_blocking(read_end, False)
    with pytest.raises(BlockingIOError):
        os.read(read_end, 1)
    rank.wait()
    assert os.read(read_end, 1) == b"", "nobody else has it open"
    os.close(read_end)


def test_crash_of_a_rank_ends_it_alone(start: Callable[..., WarmRank], tmp_path: Path) -> None:
    killed = start("main = lambda words: os.kill(os.getpid(), signal.SIGSEGV)")
    assert killed.wait() == -signal.SIGSEGV
    assert start("def main(words): raise RuntimeError('a bug')").wait() == 1
    assert printed(tmp_path)[-1] == "RuntimeError: a bug"
    assert start("main = lambda words: sys.exit(3)").wait() == 3
    assert start("main = lambda words: 0").wait() == 0


def test_interrupt_reaches_the_rank_and_not_the_warm_process(
    start: Callable[..., WarmRank],
) -> None:
    rank = start("main = lambda words: time.sleep(600)")
    server = psutil.Process(rank.pid).parent()
    assert server is not None
    server.send_signal(signal.SIGINT)
    os.kill(rank.pid, signal.SIGINT)
    assert rank.wait() == -signal.SIGINT
    assert start("main = lambda words: 0").wait() == 0


def test_rank_ends_with_the_process_that_warmed_it(
    start: Callable[..., WarmRank], tmp_path: Path
) -> None:
    code = """
from quantexp.processes.with_parent import end_with_parent
def main(words):
    end_with_parent(None)
    print("ready", flush=True)
    time.sleep(600)
"""
    for turn, number in enumerate((signal.SIGTERM, signal.SIGKILL), start=1):
        rank = start(code)
        until(partial(is_printed, tmp_path, turn))
        server = psutil.Process(rank.pid).parent()
        assert server is not None
        server.send_signal(number)
        assert rank.wait() == -number
    until(lambda: not psutil.pid_exists(rank.pid))
    with pytest.raises(TimeoutError):
        start("main = lambda words: 0", patience_s=0.2)


def test_rank_that_nobody_reaps_has_ended(start: Callable[..., WarmRank], tmp_path: Path) -> None:
    """Its warm process was killed, in a container whose first process does not wait for others."""
    set_subreaper = partial(ctypes.CDLL(None).prctl, 36)  # PR_SET_CHILD_SUBREAPER
    rank = start("def main(words): print('ready', flush=True); time.sleep(600)")
    until(partial(is_printed, tmp_path, 1))
    server = psutil.Process(rank.pid).parent()
    assert server is not None
    set_subreaper(1)
    try:
        server.kill()
        until(lambda: psutil.Process(rank.pid).ppid() == os.getpid())
        rank.kill()
        until(lambda: rank.poll() is not None)
        assert rank.wait() == -signal.SIGKILL
    finally:
        set_subreaper(0)
    os.waitpid(rank.pid, 0)


def test_another_environment_starts_cold(start: Callable[..., WarmRank]) -> None:
    assert start("main = lambda words: 0").wait() == 0
    with pytest.raises(TimeoutError):
        start("main = lambda words: 0", patience_s=0.2, OMP_NUM_THREADS="17")
    assert start("main = lambda words: 0").wait() == 0
