"""Traces pipeline ranks in processes of their own, two at a time. Torch-free itself."""

import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from titan_moe.planner.case import Case
from titan_moe.planner.figures import Memory
from titan_moe.planner.message import Message
from titan_moe.planner.usable import usable_bytes

if TYPE_CHECKING:
    from titan_moe.planner.trace.rank import RankTrace

AT_ONCE = 2


@dataclass(frozen=True)
class Trace:
    """Of a whole step; one entry per pipeline rank that was traced, in the order of memory.ranks.

    messages: counts are of a step. matmul_flops: mm, bmm, grouped; recomputed ones, too.
    attention_flops: scores and their use; forward 2 matmuls, backward 5.
    seconds, peak_bytes: what it took, and how much memory this and its processes had at most.
    """

    memory: Memory
    messages: tuple[tuple[Message, ...], ...]
    matmul_flops: tuple[int, ...]
    attention_flops: tuple[int, ...]
    seconds: float
    peak_bytes: int


def trace(
    case: Case,
    *,
    pipeline_ranks: Sequence[int] | None = None,
    kernel: Literal["gpu", "cpu"] = "gpu",
) -> Trace:
    """pipeline_ranks: all, unless some are named. kernel: whose attention's memory is counted.

    Raises:
        ValueError: what `parallelize` raises for a layout that the model cannot have.
    """
    begin = time.monotonic()
    ranks = tuple(range(case.layout.pp)) if pipeline_ranks is None else tuple(pipeline_ranks)
    shares = [ranks[first::AT_ONCE] for first in range(min(AT_ONCE, len(ranks)))]
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        for number, share in enumerate(shares):
            path = Path(folder, str(number))
            path.write_bytes(pickle.dumps((case, share, kernel)))
            workers.append((path, _start(path)))
        answers = [_finish(path, worker) for path, worker in workers]
    by_rank: dict[int, RankTrace] = {}
    for share, answer in zip(shares, answers, strict=True):
        by_rank |= dict(zip(share, answer, strict=True))
    traces = [by_rank[rank] for rank in ranks]
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Trace(
        Memory(tuple(t.memory for t in traces), usable_bytes(case.cluster), "traced"),
        tuple(t.messages for t in traces),
        tuple(t.matmul_flops for t in traces),
        tuple(t.attention_flops for t in traces),
        time.monotonic() - begin,
        own + sum(max(t.peak_bytes for t in answer) for answer in answers),
    )


def _start(path: Path) -> subprocess.Popen[str]:
    """With this process's search path, so that it finds recipes of whoever asks."""
    return subprocess.Popen(
        [sys.executable, "-m", "titan_moe.planner.trace.worker", str(path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _finish(path: Path, worker: subprocess.Popen[str]) -> "list[RankTrace]":
    _, errors = worker.communicate()
    if worker.returncode:
        raise RuntimeError(f"tracing ended with {worker.returncode}:\n{errors}")
    answer: list[RankTrace] | str = pickle.loads(path.read_bytes())
    if isinstance(answer, str):
        raise ValueError(answer)
    return answer
