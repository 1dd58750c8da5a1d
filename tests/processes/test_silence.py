"""Signs of progress, and the time without any."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from quantexp.processes.silence import Signs, Silence, Watch, signs_of

LIMIT_S = 100.0


class World:
    """A clock, and a process with signs that a test sets."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.state, self.cpu_s, self.num_bytes = "S", 0.0, 0

    def watch(self, **options: object) -> Watch:
        return Watch(
            1,
            LIMIT_S,
            read=lambda pid: Signs(self.state, self.cpu_s, self.num_bytes),
            clock=lambda: self.seconds,
            **options,  # type: ignore[arg-type]
        )

    def passes(
        self, watch: Watch, seconds: float, step: Callable[[], None] = lambda: None
    ) -> Silence | None:
        """Look every 5 seconds; returns the first silence."""
        end = self.seconds + seconds
        while self.seconds < end:
            self.seconds += 5.0
            step()
            if (silence := watch.look()) is not None:
                return silence
        return None


@pytest.fixture
def world() -> World:
    return World()


def test_stopped_process_is_silent_after_the_limit(world: World) -> None:
    watch = world.watch()
    world.state = "T"
    assert world.passes(watch, LIMIT_S - 5) is None
    silence = world.passes(watch, 10)
    assert silence == Silence(LIMIT_S, "T")
    assert str(silence) == "the process was stopped by a signal (state T)"


def test_process_that_waits_is_silent_too_and_its_state_is_named(world: World) -> None:
    silence = world.passes(world.watch(), LIMIT_S + 10)
    assert str(silence) == "the process waits and does not say for what (state S)"


@pytest.mark.parametrize(("name", "value"), [("cpu_s", 0.25), ("num_bytes", 6000), ("state", "R")])
def test_processor_time_bytes_and_readiness_are_progress(
    world: World, name: str, value: object
) -> None:
    def step() -> None:
        now = getattr(world, name)
        setattr(world, name, value if isinstance(value, str) else now + value)

    assert world.passes(world.watch(), 10 * LIMIT_S, step) is None


def test_idle_threads_that_poll_are_no_progress(world: World) -> None:
    def step() -> None:
        world.cpu_s += 0.05  # a hundredth of a processor
        world.num_bytes += 100

    assert world.passes(world.watch(), LIMIT_S + 10, step) is not None


def test_wait_for_a_disk_may_last_ten_times_as_long(world: World) -> None:
    world.state = "D"
    watch = world.watch()
    assert world.passes(watch, 10 * LIMIT_S - 10) is None
    assert str(world.passes(watch, 20)) == "the process waits for a disk (state D)"


def test_wait_may_last_longer_for_one_of_several_ranks(world: World) -> None:
    watch = world.watch(may_wait=2.0)
    assert world.passes(watch, 2 * LIMIT_S - 10) is None
    assert world.passes(watch, 20) is not None


def test_waiting_launcher_is_silent_only_while_stopped(world: World) -> None:
    watch = world.watch(may_wait=None)
    assert world.passes(watch, 20 * LIMIT_S) is None
    world.state = "T"
    assert world.passes(watch, LIMIT_S + 15) is not None


def test_time_without_a_look_does_not_count(world: World) -> None:
    """The machine slept while its clock went on, or both processes were stopped (Ctrl-Z)."""
    watch = world.watch()
    for _ in range(100):
        assert world.passes(watch, LIMIT_S / 2) is None
        world.seconds += 8 * 3600
        assert watch.look() is None
        world.cpu_s += 1  # it works again
        world.passes(watch, 10)


def test_ended_process_is_not_silent() -> None:
    assert signs_of(2**22 + 1) is None
    watch = Watch(2**22 + 1, 0.01)
    time.sleep(0.02)
    assert watch.look() is None


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def test_signs_of_a_process_come_from_the_kernel(sleeper: subprocess.Popen[bytes]) -> None:
    def state() -> str:
        signs = signs_of(sleeper.pid)
        assert signs is not None
        return signs.state

    deadline = time.monotonic() + 240
    while state() != "S" and time.monotonic() < deadline:
        time.sleep(0.02)
    sleeper.send_signal(signal.SIGSTOP)
    while state() != "T" and time.monotonic() < deadline:
        time.sleep(0.02)
    signs = signs_of(sleeper.pid)
    assert signs is not None
    assert signs.state == "T"
    assert signs.num_bytes > 0


def test_work_of_a_child_counts_as_progress() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with subprocess.Popen([sys.executable, "-c", program], start_new_session=True) as process:
        try:
            deadline, first = time.monotonic() + 240, None
            while time.monotonic() < deadline:
                signs = signs_of(process.pid)
                assert signs is not None
                first = signs.cpu_s if first is None else first
                if signs.cpu_s > first + 0.3:
                    break
                time.sleep(0.05)
            assert signs is not None
            assert signs.cpu_s > (first or 0.0) + 0.3
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_compiler_that_has_ended_was_work_too() -> None:
    compiler = "import time\nwhile time.process_time() < 0.5: pass"
    program = (
        f"import subprocess, sys, time\nsubprocess.run([sys.executable, '-c', {compiler!r}])\n"
        "print(flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            signs = signs_of(process.pid)
            assert signs is not None
            assert signs.cpu_s > 0.4
        finally:
            process.kill()
