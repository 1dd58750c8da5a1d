"""Machines that share a folder and see none of each other's locks: each run executes once, whatever the disk delays.

The disk is simulated: an order of operations that the case chooses, times in whole seconds, lists of the folder and
attributes that are up to a minute old, errors of stale handles, lost answers, clocks of the machines that differ by
minutes. A machine may stop for longer than its lease, or die, between any two operations. A process writes only right
after it has seen that its claim is valid.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from quantexp.errors import RunInUseError
from quantexp.runs.claim import LEASE_S, Claim, Disk, Machine, take_claim
from quantexp.runs.paths import RunDir

#: How old a list or a time may be that a client has kept.
CACHED_S = 60.0
#: Steps after which a case is over.
MOST_STEPS = 4000


class Died(BaseException):
    """The machine of this thread is off."""


@dataclass
class Server:
    """What is on the disk, and when."""

    case: random.Random
    seconds: float = 10_000.0
    files: dict[int, str] = field(default_factory=dict)
    touched: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    #: Every change: time, and the numbers and those over after it.
    history: list[tuple[float, tuple[int, ...], frozenset[int]]] = field(default_factory=list)
    completed: int = 0
    #: Writes of one claimant while another had the newest claim.
    clashes: list[str] = field(default_factory=list)

    def changed(self) -> None:
        self.history.append((self.seconds, tuple(self.files), frozenset(self.done)))

    def seen(self) -> tuple[tuple[int, ...], frozenset[int]]:
        """What a client sees of the folder: the present, or what it kept."""
        age = self.case.random() * CACHED_S if self.case.random() < 0.5 else 0.0
        past = [(n, d) for at, n, d in self.history if at <= self.seconds - age]
        return past[-1] if past else ((), frozenset())


class SimulatedDisk(Disk):
    """A machine's view of the server; each operation waits for its turn."""

    def __init__(self, server: Server, turn: Callable[[], None]) -> None:
        super().__init__(RunDir(Path("/simulated")))
        self.server, self.turn = server, turn
        #: What this client has seen can only grow: the client itself made its own claims.
        self.own: set[int] = set()
        self.skew_s = server.case.uniform(-300, 300)

    def _turn(self) -> None:
        self.turn()
        if self.server.case.random() < 0.01:
            raise OSError(116, "Stale file handle")

    def numbers(self) -> list[int]:
        self._turn()
        return sorted({*self.server.seen()[0], *self.own})

    def create(self, number: int, text: str) -> bool:
        self._turn()
        if number in self.server.files:
            return self.server.files[number] == text
        self.server.files[number] = text
        self._set_time(number)
        self.server.changed()
        self.own.add(number)
        if self.server.case.random() < 0.02:
            raise OSError(5, "Input/output error")  # the answer was lost
        return True

    def read(self, number: int) -> str:
        self._turn()
        return self.server.files.get(number, "")

    def is_done(self, number: int) -> bool:
        self._turn()
        return number in self.server.seen()[1]

    def end(self, number: int) -> None:
        self._turn()
        self.server.done.add(number)
        self.server.changed()

    def touch(self, number: int) -> None:
        self._turn()
        self._set_time(number)

    def _set_time(self, number: int) -> None:
        times = self.server.touched.setdefault(number, [])
        times.append((self.server.seconds, float(int(self.server.seconds))))

    def clock(self) -> float:
        return self.server.seconds + self.skew_s

    def age_s(self, number: int) -> float:
        self._turn()
        kept_s = self.server.case.random() * CACHED_S if self.server.case.random() < 0.5 else 0.0
        times = self.server.touched[number]
        known = [time for at, time in times if at <= self.server.seconds - kept_s]
        return float(int(self.server.seconds)) - (known or [times[0][1]])[-1]


class Simulation:
    """Several machines that want to execute one run, in an order of the case."""

    def __init__(self, case: random.Random, num_machines: int) -> None:
        self.case, self.server = case, Server(case)
        self.turns = [threading.Semaphore(0) for _ in range(num_machines)]
        self.back = threading.Semaphore(0)
        #: Machine -> when it continues; a machine that is off continues never.
        self.asleep = [0.0] * num_machines
        self.off = [False] * num_machines
        self.ended = [False] * num_machines
        self.num_writes = 0

    def turn(self, index: int) -> Callable[[], None]:
        def wait() -> None:
            self.back.release()
            self.turns[index].acquire()
            if self.off[index]:
                raise Died

        return wait

    def machine(self, index: int) -> None:
        """What `open_run`, its thread and its worker do; after a refusal it tries again later."""
        disk = SimulatedDisk(self.server, self.turn(index))
        own = Machine(f"boot {index}", "", f"host {index % 2}")
        try:
            self.turn(index)()
            while not self.server.completed:
                try:
                    claim = take_claim(RunDir(Path("/simulated")), own, disk)
                    if self.server.completed:  # looked at again under the claim
                        claim.end()
                        return
                    self.execute(claim, disk)
                except (RunInUseError, OSError):
                    self.turn(index)()
        except Died:
            pass
        finally:
            self.ended[index] = True
            self.back.release()

    def execute(self, claim: Claim, disk: SimulatedDisk) -> None:
        """Check and write some times, then complete, as a worker and the command above it."""
        for _ in range(self.case.randrange(2, 12)):
            if not claim.is_valid():
                return
            self.write(claim)
        if claim.is_valid():
            self.write(claim)
            self.server.completed += 1
            claim.end()

    def write(self, claim: Claim) -> None:
        """Right after a check: no other claimant may have the newest number."""
        newest = json.loads(self.server.files[max(self.server.files)])
        self.num_writes += 1
        if newest["token"] != claim.token:
            self.server.clashes.append(f"wrote beside {newest['host']}")

    def run(self) -> None:
        threads = [
            threading.Thread(target=self.machine, args=(index,), daemon=True)
            for index in range(len(self.turns))
        ]
        for thread in threads:
            thread.start()
        for _ in threads:
            self.back.acquire()
        for _ in range(MOST_STEPS):
            alive = [i for i in range(len(threads)) if not self.ended[i]]
            if not alive:
                break
            awake = [i for i in alive if self.asleep[i] <= self.server.seconds]
            self.server.seconds += self.case.choice((0.0, 0.1, 1.0, 8.0))
            if not awake:
                self.server.seconds += 30.0
                continue
            index = self.case.choice(awake)
            chance = self.case.random()
            last = len(alive) == 1
            if chance < 0.01 and not last:
                self.off[index] = True
            elif chance < 0.03:
                self.asleep[index] = self.server.seconds + self.case.uniform(1, 3 * LEASE_S)
                continue
            self.turns[index].release()
            self.back.acquire()
        for index, semaphore in enumerate(self.turns):
            self.off[index] = True
            semaphore.release()


def test_each_run_executes_once_on_machines_that_see_no_lock(
    cases: Iterator[random.Random],
) -> None:
    writes = 0
    for case in cases:
        simulation = Simulation(case, case.randrange(2, 5))
        simulation.run()
        writes += simulation.num_writes
        assert simulation.server.clashes == []
        assert simulation.server.completed <= 1
    assert writes > 0
