"""Traces of torch.profiler and CUDA memory snapshots, on request."""

import logging
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from titan_moe.config.sections import Profiling
from titan_moe.metrics.run_folder import RunFolder

logger = logging.getLogger(__name__)

MAX_MEMORY_EVENTS = 100_000  # of the allocator's history, so that it does not grow with the run


class Profiler:
    """A context around the training loop, told of every step; does nothing unless asked to.

    Every `profile_freq` steps, each rank writes rank<r>.json into <traces folder>/step-<n>/, which
    holds the `profiler_active` steps up to n; and rank<r>.pickle into <snapshot folder>/step-<n>/,
    for https://pytorch.org/memory_viz.
    """

    def __init__(self, section: Profiling, folder: RunFolder, rank: int, step: int) -> None:
        """
        step: the step that the run starts from.

        Raises:
            ValueError: a cycle is shorter than its warm-up and recording, or memory snapshots are
                wanted without CUDA.
        """
        busy = section.profiler_warmup + section.profiler_active
        if section.enable_profiling and section.profile_freq < busy:
            raise ValueError(
                f"profiling.profile_freq = {section.profile_freq}: should be at least "
                f"profiler_warmup + profiler_active = {busy}"
            )
        if section.enable_memory_snapshot and not torch.cuda.is_available():
            raise ValueError("profiling.enable_memory_snapshot = true: needs a CUDA device")
        self._section, self._rank, self._step = section, rank, step
        self._traces = folder.path / section.save_traces_folder
        self._snapshots = folder.path / section.save_memory_snapshot_folder
        self._profile: profile | None = None
        if section.enable_profiling:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(
                activities=activities,
                schedule=schedule(
                    wait=section.profile_freq - busy,
                    warmup=section.profiler_warmup,
                    active=section.profiler_active,
                ),
                on_trace_ready=self._write_trace,
                record_shapes=True,
            )

    def __enter__(self) -> Self:
        if self._section.enable_memory_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)
        if self._profile is not None:
            self._profile.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._profile is not None:
            self._profile.on_trace_ready = None  # a cycle that the end cut short is no trace
            self._profile.stop()
        if self._section.enable_memory_snapshot:
            torch.cuda.memory._record_memory_history(enabled=None)

    def end_step(self, step: int) -> None:
        """After every step."""
        self._step = step
        if self._profile is not None:
            self._profile.step()
        if self._section.enable_memory_snapshot and step % self._section.profile_freq == 0:
            path = self._file(self._snapshots, "pickle")
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
            logger.info("memory snapshot written to %s", path)

    def _write_trace(self, recorded: Any) -> None:
        path = self._file(self._traces, "json")
        recorded.export_chrome_trace(str(path))
        logger.info("trace written to %s", path)

    def _file(self, folder: Path, ending: str) -> Path:
        path = folder / f"step-{self._step}" / f"rank{self._rank}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path
