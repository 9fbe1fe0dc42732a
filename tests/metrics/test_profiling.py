"""Traces are written at the steps asked for, and hold what ran in them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from titan_moe.config.sections import Profiling
from titan_moe.metrics.profiling import Profiler
from titan_moe.metrics.run_folder import RunFolder


def run(parent: Path, first: int, last: int, **keys: Any) -> Path:
    folder = RunFolder(parent, "tiny")
    with Profiler(Profiling(**keys), folder, rank=2, step=first - 1) as profiler:
        for step in range(first, last + 1):
            with torch.profiler.record_function(f"training step {step}"):
                torch.ones(2) @ torch.ones(2)
            profiler.end_step(step)
    return folder.path


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_traces(tmp_path: Path) -> None:
    keys = {"enable_profiling": True, "profile_freq": 4, "profiler_warmup": 1, "profiler_active": 2}
    path = run(tmp_path, 11, 20, **keys)
    traces = sorted(path.rglob("*.json"))
    assert traces == [path / "profile_traces" / f"step-{n}" / "rank2.json" for n in (14, 18)]
    events = json.loads(traces[1].read_text())["traceEvents"]
    steps = {event["name"] for event in events if event["name"].startswith("training step")}
    assert steps == {"training step 17", "training step 18"}
    assert any(event["name"] == "aten::dot" for event in events)


def test_nothing_unless_asked(tmp_path: Path) -> None:
    assert not run(tmp_path, 1, 30).exists()


def test_a_cycle_too_short(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"profile_freq = 3: .*at least .* = 4"):
        run(tmp_path, 1, 1, enable_profiling=True, profile_freq=3)


def test_snapshots_need_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="enable_memory_snapshot = true: needs a CUDA device"):
        run(tmp_path, 1, 1, enable_memory_snapshot=True)
