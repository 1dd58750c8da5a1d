"""Each slot has its own GPUs or cores; more than the machine has is refused before anything starts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest
import torch
from quantexp_launchers.local import slots
from quantexp_launchers.local.slots import Slot, make_slots, slots_for, visible_gpus

from quantexp.errors import ConfigError, RunError
from quantexp.processes.machine import ranges
from quantexp.schema import Experiment, LauncherConfig


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A machine without GPUs, on which this process may use `count` cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(slots, "visible_gpus", list)

    def use(count: int) -> None:
        monkeypatch.setattr(slots, "allowed_cores", lambda: list(range(4, 4 + count)))

    return use


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine with GPUs of these names."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(slots, "allowed_cores", lambda: list(range(8)))

    def use(*names: str) -> None:
        monkeypatch.setattr(slots, "has_driver", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(names))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda i=0: names[i])

    return use


def test_one_slot_is_the_whole_machine_as_it_is(cores: Callable[[int], None]) -> None:
    cores(8)
    (slot,) = make_slots(1, 2)
    assert slot == Slot()
    assert slot.variables(LauncherConfig(num_processes=2)) == {}
    assert str(slot) == "the whole machine"


def test_slots_share_the_cores_equally_and_leave_the_rest(cores: Callable[[int], None]) -> None:
    cores(8)
    layout = make_slots(3, 1)
    assert [slot.cores for slot in layout] == [(4, 5), (6, 7), (8, 9)]
    assert [str(slot) for slot in layout] == ["core 4-5", "core 6-7", "core 8-9"]
    assert {slot.variables(LauncherConfig())["OMP_NUM_THREADS"] for slot in layout} == {"2"}


def test_processes_of_a_run_share_its_slot(cores: Callable[[int], None]) -> None:
    cores(8)
    slot = make_slots(2, 2)[0]
    assert slot.variables(LauncherConfig(num_processes=2)) == {"OMP_NUM_THREADS": "2"}
    assert slot.variables(LauncherConfig(num_processes=1)) == {"OMP_NUM_THREADS": "4"}
    assert slot.variables(LauncherConfig(num_processes=9)) == {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(("limit", "threads"), [("1", "1"), ("64", "4"), ("", "4"), ("4,2", "4")])
def test_omp_num_threads_of_the_user_is_an_upper_limit(
    cores: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, limit: str, threads: str
) -> None:
    cores(8)
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    assert make_slots(2, 1)[0].variables(LauncherConfig()) == {"OMP_NUM_THREADS": threads}


def test_threads_of_the_configuration_are_left_to_the_worker(cores: Callable[[int], None]) -> None:
    cores(8)
    assert make_slots(2, 1)[0].variables(LauncherConfig(num_threads=3)) == {}


def test_more_slots_than_cores_are_refused(cores: Callable[[int], None]) -> None:
    cores(2)
    with pytest.raises(
        RunError,
        match=r"launcher\.max_parallel=3 needs a core for each run, and this process may use 2; lower it",
    ):
        make_slots(3, 1)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")
def test_thread_in_a_slot_keeps_to_its_cores_and_others_do_not() -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    affinities: list[set[int]] = []

    def enter() -> None:
        Slot(cores=(core,)).enter()
        affinities.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert affinities == [{core}]
    assert os.sched_getaffinity(0) == before


def test_each_slot_has_a_gpu_for_each_process(gpus: Callable[..., None]) -> None:
    gpus(*["H200"] * 5)
    layout = make_slots(2, 2)
    assert [slot.gpus for slot in layout] == [("0", "1"), ("2", "3")]
    assert [str(slot) for slot in layout] == ["GPU 0,1", "GPU 2,3"]
    assert layout[1].variables(LauncherConfig(num_processes=2)) == {
        "CUDA_VISIBLE_DEVICES": "2,3",
        "OMP_NUM_THREADS": "2",
    }
    assert layout[1].variables(LauncherConfig(num_processes=1))["CUDA_VISIBLE_DEVICES"] == "2"


def test_slots_share_the_gpus_that_the_user_made_visible(
    gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus("H200", "H200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7f, 3,99")  # GPU 99 does not exist
    assert visible_gpus() == ["GPU-7f", "3"]
    assert [slot.gpus for slot in make_slots(2, 1)] == [("GPU-7f",), ("3",)]


def test_more_gpus_than_the_machine_has_are_refused(gpus: Callable[..., None]) -> None:
    gpus("H200", "H200")
    with pytest.raises(
        RunError,
        match=r"launcher\.max_parallel=2 x launcher\.num_processes=2 needs a GPU for each process, 4 in all, and this "
        r"machine has 2; lower one of them",
    ):
        make_slots(2, 2)


def test_gpus_of_two_kinds_are_refused(gpus: Callable[..., None]) -> None:
    gpus("H200", "A100")
    with pytest.raises(
        RunError, match=r"needs 2 GPUs of one kind, .* are A100, H200; choose some with CUDA_VISI"
    ):
        make_slots(2, 1)


def test_slots_are_large_enough_for_the_largest_run(
    gpus: Callable[..., None], make: Callable[..., Experiment]
) -> None:
    gpus(*["H200"] * 4)
    runs = [make(num_processes=n, max_parallel=2) for n in (1, 2)]
    assert [slot.gpus for slot in slots_for(runs)] == [("0", "1"), ("2", "3")]


def test_sweep_without_a_number_has_one_slot(
    cores: Callable[[int], None], make: Callable[..., Experiment]
) -> None:
    cores(8)
    assert len(slots_for([make(1), make(2)])) == 1


def test_runs_with_different_max_parallel_are_refused(
    make: Callable[..., Experiment],
) -> None:
    with pytest.raises(
        ConfigError, match=r"launcher\.max_parallel is one for the whole sweep, got 2, 3; give it"
    ):
        slots_for([make(1, max_parallel=2), make(2, max_parallel=3)])


def test_ranges_are_short() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert ranges([]) == ""
