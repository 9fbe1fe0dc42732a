"""The learning rate at every boundary, by hand: 100 steps of 4 × 8 tokens, peak 1."""

import math
from typing import Any

import pytest

from titan_moe.config.sections import LrScheduler, Optimizer, Training
from titan_moe.optim.schedule import learning_rate

BATCH_TOKENS = 4 * 8


def lr_of_step(step: int, steps: int = 100, **scheduler: Any) -> float:
    """Steps count from 1."""
    training = Training(local_batch_size=1, global_batch_size=4, seq_len=8, steps=steps)
    return learning_rate(
        (step - 1) * BATCH_TOKENS, Optimizer(lr=1.0), LrScheduler(**scheduler), training
    )


@pytest.mark.parametrize(
    ("decay_type", "quarter", "half"),
    [
        ("linear", 0.75, 0.5),
        ("sqrt", 0.5, 1.0 - math.sqrt(0.5)),
        ("cosine", 0.5 + math.sqrt(0.5) / 2.0, 0.5),
    ],
)
def test_boundaries(decay_type: str, quarter: float, half: float) -> None:
    keys = {"warmup_steps": 10, "decay_ratio": 0.4, "decay_type": decay_type, "min_lr_factor": 0.2}
    expected = {
        1: 0.1,  # never 0: the first step moves
        9: 0.9,
        10: 1.0,
        11: 1.0,
        60: 1.0,  # the last of the stable phase
        70: 0.2 + 0.8 * quarter,
        80: 0.2 + 0.8 * half,
        100: 0.2,
        101: 0.2,
        1000: 0.2,
    }
    for step, lr in expected.items():
        assert lr_of_step(step, **keys) == pytest.approx(lr, rel=1e-12), step


def test_without_a_ratio_all_after_warmup_decays() -> None:
    assert lr_of_step(20, warmup_steps=20) == 1.0
    assert lr_of_step(60, warmup_steps=20) == pytest.approx(0.5)
    assert lr_of_step(100, warmup_steps=20) == 0.0


def test_no_warmup_and_no_decay() -> None:
    for step in (1, 50, 100, 200):
        assert lr_of_step(step, warmup_steps=0, decay_ratio=0.0) == 1.0
    assert lr_of_step(1, warmup_steps=0) == pytest.approx(0.99)


def test_a_run_shorter_than_its_warmup_only_warms_up() -> None:
    assert lr_of_step(50, steps=50, warmup_steps=200) == pytest.approx(0.25)


def test_total_steps_may_differ_from_the_runs() -> None:
    keys = {"warmup_steps": 0, "decay_ratio": 0.5, "total_steps": 200}
    assert lr_of_step(100, **keys) == 1.0
    assert lr_of_step(150, **keys) == pytest.approx(0.5)


def test_warmup_and_decay_that_overlap_are_refused() -> None:
    with pytest.raises(ValueError, match=r"30 warmup_steps \+ 80 steps of decay .*the 100 total"):
        lr_of_step(1, warmup_steps=30, decay_ratio=0.8)


def test_between_whole_steps_it_interpolates() -> None:
    """It is a function of tokens, which a resumed run with another batch size need not align."""
    optimizer, scheduler = Optimizer(lr=1.0), LrScheduler(warmup_steps=10)
    training = Training(local_batch_size=1, global_batch_size=4, seq_len=8, steps=100)
    assert learning_rate(BATCH_TOKENS // 2, optimizer, scheduler, training) == pytest.approx(0.15)
