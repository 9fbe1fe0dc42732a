"""The pool itself: results, failures and hangs reach the test, and the pool survives them."""

import os
import time

import pytest
import torch
from torch import distributed as dist

from titan_moe.check.pool import Pool


def total_of_ranks(scale: float) -> float:
    total = torch.tensor(scale * dist.get_rank())
    dist.all_reduce(total)
    return float(total)


def fail_on_last_rank() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("a fault of my own")
    dist.barrier()


def hang_on_rank_0() -> None:
    if dist.get_rank() == 0:
        time.sleep(600.0)


def die() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


def test_results_failures_hangs_and_deaths(pool: Pool) -> None:
    assert pool.run(1, total_of_ranks, 10.0) == [0.0]
    assert pool.run(4, total_of_ranks, 10.0) == [60.0] * 4
    with pytest.raises(ValueError, match="a fault of my own") as failure:
        pool.run(2, fail_on_last_rank)
    assert "fail_on_last_rank" in "".join(failure.value.__notes__)
    with pytest.raises(TimeoutError, match=r"ranks \[0\] of 2"):
        pool.run(2, hang_on_rank_0, timeout_seconds=3.0)
    with pytest.raises(RuntimeError, match="rank 1 died, exit code 7"):
        pool.run(2, die)
    assert pool.run(3, total_of_ranks, 1.0) == [3.0] * 3
