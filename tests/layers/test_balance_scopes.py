"""Balance over a group of sequences, and against the step before: values and gradients by hand.

B rows, S sequence, D hidden, E experts, K chosen per token, G rows of a group.
"""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tests.data.corpora import make_config, source
from tests.layers.helpers import error, fill
from tests.tolerances import FP32_REORDERED
from titan_moe.config.model import Balance, ModelConfig
from titan_moe.layers.experts import Experts
from titan_moe.layers.moe import MoE
from titan_moe.layers.router import Router

B, S, D, E, K, G = 4, 6, 16, 8, 2, 2
SOURCE = source("none")
COUNTS = torch.tensor([9, 1, 0, 4, 4, 2, 3, 1])
WEIGHT, SCALE = 0.3, 0.25


def build(**settings: Any) -> MoE:
    router = Router(
        D, E, K, score_function="softmax", normalize_weights=True, route_scale=1.0, std=0.5
    )
    balance = Balance(balance_loss_weight=WEIGHT, **settings)
    moe: MoE = fill(MoE(router, Experts(E, D, 8, std=0.3), None, balance=balance))
    moe.previous_counts.copy_(COUNTS)
    moe.aux_scale.fill_(SCALE)
    return moe


def batch() -> tuple[Tensor, Tensor]:
    """A whole row beside a shorter one, then one of padding alone beside a shorter one."""
    valid_BS = torch.ones(B, S, dtype=torch.bool)
    valid_BS[1, 2:] = False
    valid_BS[2] = False
    valid_BS[3, 5:] = False
    x_BSD = torch.randn(B, S, D, generator=torch.Generator().manual_seed(3))
    return x_BSD.requires_grad_(), valid_BS


def shares(moe: MoE, x_TD: Tensor) -> list[Tensor]:
    """Of each token: its logits' exponentials by their sum."""
    powers = [(moe.router.weight @ x_D).exp() for x_D in x_TD]
    return [power / power.sum() for power in powers]


def of_groups(moe: MoE, x_BSD: Tensor, valid_BS: Tensor) -> Tensor:
    """A group's tokens as one long sequence's; as many times as it has sequences."""
    total = torch.zeros(())
    for begin in range(0, B, G):
        rows = range(begin, begin + G)
        tokens = shares(moe, torch.cat([x_BSD[row][valid_BS[row]] for row in rows]))
        for e in range(E):
            chosen = sum(e in s.detach().argsort(descending=True)[:K].tolist() for s in tokens)
            f = E * chosen / (K * len(tokens))
            total = total + G * f * sum(share[e] for share in tokens) / len(tokens)
    return WEIGHT * total


def of_step_before(moe: MoE, x_BSD: Tensor, valid_BS: Tensor) -> Tensor:
    total = torch.zeros(())
    for x_SD, valid_S in zip(x_BSD, valid_BS, strict=True):
        tokens = shares(moe, x_SD[valid_S])
        for e in range(E):
            f = E * int(COUNTS[e]) / int(COUNTS.sum())
            for share in tokens:
                total = total + f * share[e] / len(tokens)
    return WEIGHT * total


SCOPES = {
    "group": ({"balance_loss_scope": "group", "balance_group_size": G}, of_groups),
    "global": ({"balance_loss_scope": "global"}, of_step_before),
}


@pytest.mark.parametrize("scope", SCOPES)
def test_loss_and_gradients_by_hand(scope: str) -> None:
    settings, reference = SCOPES[scope]
    moe, (x_BSD, valid_BS) = build(**settings), batch()
    by_hand = reference(moe, x_BSD, valid_BS)
    leaves = [moe.router.weight, x_BSD]
    expected = torch.autograd.grad(by_hand * SCALE, leaves)
    moe(x_BSD, valid_BS).backward(torch.zeros(B, S, D))  # what is left is the balance's
    assert error(moe.balance_loss_sum, by_hand) < FP32_REORDERED
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert leaf.grad is not None
        assert error(leaf.grad, gradient) < FP32_REORDERED


def test_scopes_differ() -> None:
    """Else the references above could stand for each other."""
    settings = [{}, *(keys for keys, _ in SCOPES.values())]
    losses = []
    for keys in settings:
        moe = build(**keys)
        moe(*batch())
        losses.append(moe.balance_loss_sum.item())
    assert len({round(loss, 4) for loss in losses}) == len(settings)


def test_before_the_first_step_nothing_is_out_of_balance() -> None:
    moe, (x_BSD, valid_BS) = build(balance_loss_scope="global"), batch()
    moe.previous_counts.zero_()
    moe(x_BSD, valid_BS).backward(torch.zeros(B, S, D))
    assert moe.balance_loss_sum == 0
    assert moe.router.weight.grad is not None
    assert not moe.router.weight.grad.any()


def test_the_step_before_is_the_last_update_of_the_bias() -> None:
    moe, counts_E = build(balance_loss_scope="global"), COUNTS.flip(0)
    moe.update_selection_bias(counts_E)
    assert torch.equal(moe.previous_counts, counts_E)
    assert "previous_counts" in moe.state_dict()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"balance_loss_scope": "group"}, "needs balance_group_size, the sequences of a group"),
        ({"balance_group_size": 2}, 'balance_group_size = 2 is for balance_loss_scope = "group"'),
        (
            {"balance_loss_scope": "global", "balance_loss_weight": 0.0},
            "balance_loss_weight is 0: give a weight",
        ),
    ],
)
def test_a_scope_that_nothing_heeds_is_refused(keys: dict[str, Any], message: str) -> None:
    model = make_config(SOURCE).model.model_dump(exclude_none=True)
    with pytest.raises(ValidationError, match=message):
        ModelConfig.model_validate(model | keys)
