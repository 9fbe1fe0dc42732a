"""How fast, and how full: a stopwatch over the steps between two log lines, and memory."""

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

GIB = 2**30


@dataclass(frozen=True)
class Pace:
    """Means per step since the last reading, pauses excluded."""

    step_seconds: float
    data_seconds: float


class Stopwatch:
    """Times training steps: waiting for data counts and is told apart, pauses do not count."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._restart()

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Around the call that brings the next batch."""
        began = self._clock()
        try:
            yield
        finally:
            self._data_seconds += self._clock() - began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is not training: validation, saving."""
        began = self._clock()
        try:
            yield
        finally:
            self._paused_seconds += self._clock() - began

    def end_step(self) -> None:
        """Once per step. On a GPU, work may still be queued: reading a result waits for it."""
        self._steps += 1

    def read(self) -> Pace:
        """The pace since the last reading; call it after the step's results have been read."""
        assert self._steps > 0, "no step has ended since the last reading"
        seconds = self._clock() - self._began - self._paused_seconds
        pace = Pace(seconds / self._steps, self._data_seconds / self._steps)
        self._restart()
        return pace

    def _restart(self) -> None:
        self._began = self._clock()
        self._steps, self._data_seconds, self._paused_seconds = 0, 0.0, 0.0


def memory_peak_gib(device: torch.device) -> float:
    """Most memory held so far, in GiB: tensors on a GPU, else the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def device_name(device: torch.device) -> str:
    """As the driver reports it; "cpu" for the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
