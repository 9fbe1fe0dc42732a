"""Expert balance against counts done by hand."""

import math

import pytest
import torch

from titan_moe.metrics.balance import ExpertBalance, expert_balance


def test_by_hand() -> None:
    counts_LE = torch.tensor([[4, 0, 2, 2], [2, 2, 2, 2], [8, 0, 0, 0]])
    biases_LE = torch.tensor([[0.5, -0.25, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.5]])
    balance = expert_balance(counts_LE, biases_LE)
    assert balance.max_violation == 3.0  # the last layer: 8 where the mean is 2
    assert balance.dead_experts == 4  # one in the first layer, three in the last
    bits = [1.5, 2.0, 0.0]  # 1/2, 1/4, 1/4;  four times 1/4;  one expert
    assert balance.entropy == pytest.approx(sum(bits) / 3 / math.log2(4), abs=1e-15)
    assert balance.bias_range == 0.75


def test_a_worse_layer_is_not_averaged_away() -> None:
    even = torch.full((9, 4), 2)
    uneven = torch.tensor([[3, 2, 2, 1]])
    assert expert_balance(torch.cat([even, uneven])).max_violation == 0.5


def test_counts_beyond_float_precision() -> None:
    counts_LE = torch.tensor([[2**40 + 1, 2**40 - 1]])
    assert expert_balance(counts_LE).max_violation == pytest.approx(2**-40, rel=1e-3)


@pytest.mark.parametrize("counts_LE", [None, torch.zeros((0, 4), dtype=torch.int64)])
def test_no_experts(counts_LE: torch.Tensor | None) -> None:
    assert expert_balance(counts_LE, None) == ExpertBalance(None, None, None, None)


def test_nothing_routed() -> None:
    balance = expert_balance(torch.zeros((2, 3), dtype=torch.int64))
    assert balance == ExpertBalance(None, None, None, None)


def test_a_layer_that_no_token_reached_tells_nothing() -> None:
    reached = torch.tensor([[4, 0, 2, 2], [2, 2, 2, 2]])
    counts_LE = torch.cat([reached, torch.zeros((1, 4), dtype=torch.int64)])
    assert expert_balance(counts_LE) == expert_balance(reached)


def test_one_expert_is_balanced() -> None:
    balance = expert_balance(torch.tensor([[5]]))
    assert (balance.max_violation, balance.entropy) == (0.0, 1.0)
