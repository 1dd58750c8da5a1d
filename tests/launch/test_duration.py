"""The work of a training and how long it takes here, from rates that are measured once."""

from __future__ import annotations

import pytest

from quantexp.config.compose import compose
from quantexp.launch import duration as module
from quantexp.launch.duration import duration, in_words, work
from quantexp.launch.machine_rates import Rates
from quantexp.model.sizes import flops_per_iteration, num_parameters
from quantexp.schema import Experiment


def composed(*words: str) -> Experiment:
    return compose(["training=fast", "model.num_layers=1", *words], None, {})


@pytest.fixture(autouse=True)
def _rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 GFLOP/s, 10 GB/s, a machine with two threads and no GPU."""
    monkeypatch.setattr(module, "rates_of", lambda *_: Rates(100.0, 2, 10e9))
    monkeypatch.setattr(module, "device_class", lambda _: "cpu")


def seconds(*words: str) -> float:
    takes = duration(composed(*words))
    assert takes is not None
    return takes.seconds


def test_work_counts_every_iteration_that_the_run_itself_takes() -> None:
    experiment = composed()
    each = flops_per_iteration(experiment.model, 128, 2)
    assert work(experiment) == module.Work(8, 8 * 2 * 128, 8 * each)
    experiment.training.start_from = "earlier@6"
    assert work(experiment).iterations == 2


def test_time_is_that_of_products_and_parameter_updates() -> None:
    experiment = composed()
    products = work(experiment).flop / 100e9
    updates = 8 * num_parameters(experiment.model) * module._BYTES_PER_PARAMETER / 10e9
    assert seconds() == pytest.approx(products + updates)


def test_recomputation_and_evaluation_take_additional_forward_passes() -> None:
    experiment = composed()
    products = work(experiment).flop / 100e9
    assert seconds("training.recompute=full") - seconds() == pytest.approx(products / 3)
    evaluated = seconds("evaluation.every=4", "evaluation.samples=6") - seconds()
    assert evaluated == pytest.approx(2 * flops_per_iteration(experiment.model, 128, 6) / 3 / 100e9)


def test_processes_share_a_cpu_and_each_updates_all_parameters() -> None:
    more = seconds("launcher.num_processes=2", "training.micro_batch_size=1") - seconds()
    updates = 8 * num_parameters(composed().model) * module._BYTES_PER_PARAMETER / 10e9
    assert more == pytest.approx(updates)


def test_fewer_threads_than_measured_take_longer() -> None:
    products = work(composed()).flop / 100e9
    assert seconds("launcher.num_threads=1") - seconds() == pytest.approx(products)
    assert seconds("launcher.num_threads=9") == seconds()


def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "device_class", lambda _: "NVIDIA H200")
    takes = duration(composed("launcher.num_processes=2", "training.micro_batch_size=1"))
    assert takes is not None
    assert takes.gflop_per_s == 200.0


def test_time_on_a_full_gpu_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "rates_of", lambda *_: None)
    assert duration(composed()) is None


def test_time_of_a_job_is_unknown() -> None:
    assert duration(composed("launcher=slurm")) is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (99.4, "99 s"),
        (100, "2 min"),
        (5900, "98 min"),
        (11_000, "3.1 h"),
        (90_000, "25 h"),
        (864_000, "10 days"),
        (3_000_000, "months"),
        (260_000_000, "years"),
    ],
)
def test_time_has_two_digits_where_it_can(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
