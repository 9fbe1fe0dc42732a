"""The stopwatch against a clock that the test turns."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from titan_moe.metrics.speed import GIB, Stopwatch, device_name, memory_peak_gib


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def steps(clock: Clock, stopwatch: Stopwatch, data: float, work: float) -> Iterator[None]:
    while True:
        with stopwatch.waiting_for_data():
            clock.now += data
        clock.now += work
        stopwatch.end_step()
        yield


def test_pauses_do_not_count_and_windows_do_not_mix() -> None:
    clock = Clock()
    stopwatch = Stopwatch(clock)
    slow = steps(clock, stopwatch, data=1.0, work=3.0)
    next(slow)
    with stopwatch.paused():
        clock.now += 1000.0
    next(slow)
    pace = stopwatch.read()
    assert (pace.step_seconds, pace.data_seconds) == (4.0, 1.0)

    with stopwatch.paused():
        clock.now += 50.0
    next(steps(clock, stopwatch, data=0.25, work=0.25))
    pace = stopwatch.read()
    assert (pace.step_seconds, pace.data_seconds) == (0.5, 0.25)


def test_a_pause_that_fails_is_still_a_pause() -> None:
    clock = Clock()
    stopwatch = Stopwatch(clock)

    def fail() -> None:
        with stopwatch.paused():
            clock.now += 9.0
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    next(steps(clock, stopwatch, data=0.0, work=2.0))
    assert stopwatch.read().step_seconds == 2.0


def test_memory_of_a_process() -> None:
    cpu = torch.device("cpu")
    mapped_gib = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / GIB
    block = torch.ones(2**26)  # a quarter of a GiB
    assert memory_peak_gib(cpu) >= mapped_gib + 0.2
    assert memory_peak_gib(cpu) < 16 * (mapped_gib + 0.25)
    assert block[0] == 1
    assert device_name(cpu) == "cpu"
