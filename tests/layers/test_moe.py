"""The whole layer by hand: counts, bias, balance and z-loss, padding, recomputation, settings.

B batch, S sequence, T = B·S tokens, D hidden, E experts, K experts chosen per token.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.layers.helpers import error, fill
from tests.tolerances import FP32_REORDERED
from titan_moe.config.model import Balance
from titan_moe.layers.experts import Experts
from titan_moe.layers.mlp import SwiGLU
from titan_moe.layers.moe import MoE
from titan_moe.layers.router import ROUTING_OPS, Router

B, S, D, E, K = 3, 10, 16, 8, 2


def build(*, shared: bool = True, **settings: float) -> MoE:
    router = Router(
        D, E, K, num_groups=4, num_limited_groups=2, score_function="sigmoid",
        normalize_weights=True, route_scale=2.5, std=0.5,
    )  # fmt: skip
    experts = Experts(E, D, 8, std=0.3)
    beside = SwiGLU(D, 8, std=0.3) if shared else None
    moe: MoE = fill(MoE(router, experts, beside, balance=Balance(**settings)))
    moe.router.selection_bias.copy_(torch.randn(E) * 0.2)
    return moe


def batch() -> tuple[Tensor, Tensor]:
    """x_BSD and valid_BS: a whole row, a half-padded row, a row of padding alone."""
    valid_BS = torch.ones(B, S, dtype=torch.bool)
    valid_BS[1, 6:] = False
    valid_BS[2] = False
    return torch.randn(B, S, D, generator=torch.Generator().manual_seed(3)), valid_BS


def auxiliary_loss(moe: MoE, x_BSD: Tensor, valid_BS: Tensor) -> Tensor:
    """Equations 17 to 20 and the z-loss, token by token, differentiable, summed over sequences."""
    total = torch.zeros(())
    for x_SD, valid_S in zip(x_BSD, valid_BS, strict=True):
        tokens = x_SD[valid_S]
        if len(tokens) == 0:
            continue
        logits = [moe.router.weight @ x_D for x_D in tokens]
        scores = [1 / (1 + torch.exp(-row)) for row in logits]
        shares = [s / s.sum() for s in scores]
        for e in range(E):
            chosen = sum(e in s.detach().argsort(descending=True)[:K].tolist() for s in scores)
            f = E / (K * len(tokens)) * chosen
            p = torch.stack([share[e] for share in shares]).mean()
            total = total + moe.balance_loss_weight * f * p
        squares = [row.exp().sum().log() ** 2 for row in logits]
        total = total + moe.z_loss_weight * torch.stack(squares).mean()
    return total


def recompute(moe: MoE, *inputs: Tensor) -> Tensor:
    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op in ROUTING_OPS
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(moe, *inputs, use_reentrant=False, context_fn=contexts)


def compiled(moe: MoE, *inputs: Tensor) -> Tensor:
    return torch.compile(moe, backend="aot_eager", fullgraph=True)(*inputs)


FORWARDS: list[Callable[..., Tensor]] = [MoE.__call__, recompute, compiled]


@pytest.mark.parametrize("forward", FORWARDS)
def test_one_step_leaves_exactly_its_trace(forward: Callable[..., Tensor]) -> None:
    """Counts, loss value and gradients by hand; once, also where the forward runs twice."""
    moe = build(balance_loss_weight=0.3, z_loss_weight=0.2, bias_update_rate=0.01)
    moe.aux_scale.fill_(0.25)
    x_BSD, valid_BS = batch()
    x_BSD.requires_grad_()

    by_hand = auxiliary_loss(moe, x_BSD, valid_BS)
    leaves = [moe.router.weight, x_BSD]
    expected = torch.autograd.grad(by_hand * 0.25, leaves)
    forward(moe, x_BSD, valid_BS).backward(torch.zeros(B, S, D))  # what is left is the balance's
    assert error(moe.balance_loss_sum, by_hand) < FP32_REORDERED
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert leaf.grad is not None
        assert error(leaf.grad, gradient) < FP32_REORDERED

    moe.eval()
    ids_TK = moe.router.select(
        moe.router.scores(moe.router(x_BSD.flatten(0, 1))),
        torch.zeros(B * S, dtype=torch.bool),
        torch.zeros(E, dtype=torch.int64),
        round_robin=False,
    )
    chosen = ids_TK[valid_BS.flatten()].flatten().tolist()
    assert moe.counts.tolist() == [chosen.count(e) for e in range(E)]
    assert moe.counts.sum() == valid_BS.sum() * K


@pytest.mark.parametrize("forward", FORWARDS)
def test_all_gradients_are_those_of_loss_plus_balance(forward: Callable[..., Tensor]) -> None:
    with_balance = build(balance_loss_weight=0.3, z_loss_weight=0.2)
    without = build()
    without.load_state_dict(with_balance.state_dict())
    x_BSD, valid_BS = batch()

    forward(with_balance, x_BSD, valid_BS).square().sum().backward()
    (without(x_BSD, valid_BS).square().sum() + auxiliary_loss(
        _with_weights(without), x_BSD, valid_BS
    )).backward()  # fmt: skip
    for (name, p), q in zip(with_balance.named_parameters(), without.parameters(), strict=True):
        assert p.grad is not None, name
        assert q.grad is not None, name
        assert error(p.grad, q.grad) < FP32_REORDERED, name


def _with_weights(moe: MoE) -> MoE:
    moe.balance_loss_weight, moe.z_loss_weight = 0.3, 0.2
    return moe


def test_recomputation_keeps_the_choice_where_scores_come_out_otherwise() -> None:
    """Near-ties: a forward run again need not repeat the last bits that the choice hung on."""
    moe = build(balance_loss_weight=0.3)
    x_BSD, valid_BS = batch()
    dispatch, score = moe.dispatcher.dispatch, moe.router.scores
    seen: list[Tensor] = []

    def watch(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Any:
        seen.append(ids_TK.clone())
        return dispatch(x_TD, ids_TK, weights_TK)

    moe.dispatcher.dispatch = watch  # type: ignore[method-assign]
    moe.router.scores = lambda x: score(x * (-1.0 if seen else 1.0))  # type: ignore[method-assign]
    recompute(moe, x_BSD.requires_grad_(), valid_BS).sum().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)


def test_output_is_the_weighted_experts_plus_the_shared_one() -> None:
    moe = build().eval()
    x_BSD, valid_BS = batch()
    x_TD = x_BSD.flatten(0, 1)
    scores_TE = moe.router.scores(moe.router(x_TD))
    nobody = torch.zeros(B * S, dtype=torch.bool)
    ids_TK = moe.router.select(scores_TE, nobody, moe.counts, round_robin=False)
    weights_TK = moe.router.weights(scores_TE, ids_TK)
    assert moe.shared is not None
    expected_TD = moe.shared(x_TD)
    for t in range(B * S):  # padding flows like any token
        for weight, e in zip(weights_TK[t], ids_TK[t].tolist(), strict=True):
            gate, up = x_TD[t] @ moe.experts.gate[e], x_TD[t] @ moe.experts.up[e]
            expected_TD[t] += weight * ((gate * gate.sigmoid() * up) @ moe.experts.down[e])
    assert error(moe(x_BSD, valid_BS).flatten(0, 1), expected_TD) < FP32_REORDERED


def test_evaluation_leaves_no_trace() -> None:
    moe = build(balance_loss_weight=0.3, z_loss_weight=0.2).eval()
    before = {name: buffer.clone() for name, buffer in moe.named_buffers()}
    moe(*batch())
    assert all(torch.equal(buffer, before[name]) for name, buffer in moe.named_buffers())


def test_a_sequence_weighs_the_same_in_any_batch() -> None:
    moe = build(balance_loss_weight=0.3, z_loss_weight=0.2)
    x_BSD, valid_BS = batch()
    moe(x_BSD, valid_BS)
    together, counts = moe.balance_loss_sum.clone(), moe.counts.clone()
    moe.balance_loss_sum.zero_()
    moe.counts.zero_()
    for row in range(B):
        moe(x_BSD[row : row + 1], valid_BS[row : row + 1])
    assert error(moe.balance_loss_sum, together) < FP32_REORDERED
    assert torch.equal(moe.counts, counts)


def test_selection_bias_moves_by_its_rate_in_place_once_per_step() -> None:
    moe = build(bias_update_rate=0.01)
    saved = moe.state_dict()  # refers to the buffers themselves
    before = moe.router.selection_bias.clone()
    counts = torch.tensor([5, 3, 4, 4, 9, 0, 4, 3])  # mean 4
    moe.update_selection_bias(counts)
    moved = saved["router.selection_bias"] - before
    assert moved.tolist() == pytest.approx([-0.01, 0.01, 0, 0, -0.01, 0.01, 0, 0.01], abs=1e-7)
    assert saved["previous_counts"].tolist() == counts.tolist()
    assert set(saved) >= {"router.selection_bias", "previous_counts"}
    assert not set(saved) & {"counts", "balance_loss_sum", "aux_scale"}


def test_a_mean_between_integers_has_a_side() -> None:
    moe = build(bias_update_rate=1.0)
    moe.router.selection_bias.zero_()
    moe.update_selection_bias(torch.tensor([2**60, 2**60 + 1, 0, 0, 0, 0, 0, 0]) // 64)
    assert moe.router.selection_bias.tolist() == [-1, -1, 1, 1, 1, 1, 1, 1]


def test_rate_zero_still_remembers_counts() -> None:
    moe = build()
    before = moe.router.selection_bias.clone()
    moe.update_selection_bias(torch.arange(E))
    assert torch.equal(moe.router.selection_bias, before)
    assert torch.equal(moe.previous_counts, torch.arange(E))


def test_forced_balance_counts_evenly_and_keeps_gradients() -> None:
    moe = build()
    moe.force_balance = True
    moe(torch.randn(2, E, D), torch.ones(2, E, dtype=torch.bool)).sum().backward()
    assert moe.counts.tolist() == [2 * K] * E
    assert moe.router.weight.grad is not None
    assert moe.router.weight.grad.abs().sum() > 0


def test_dtypes_survive_a_bf16_default_and_a_cast() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        moe = build(balance_loss_weight=0.3, z_loss_weight=0.2)
    finally:
        torch.set_default_dtype(torch.float32)
    for module in (moe, moe.to(torch.bfloat16)):
        dtypes = {name: t.dtype for name, t in module.state_dict(keep_vars=True).items()}
        dtypes |= {name: t.dtype for name, t in module.named_buffers()}
        fp32 = {"router.weight", "router.selection_bias", "balance_loss_sum", "aux_scale"}
        int64 = {"counts", "previous_counts"}
        assert {n for n, dtype in dtypes.items() if dtype == torch.float32} == fp32
        assert {n for n, dtype in dtypes.items() if dtype == torch.int64} == int64
        assert all(t == torch.bfloat16 for n, t in dtypes.items() if n not in fp32 | int64)
        x_BSD, valid_BS = batch()
        out_BSD = module(x_BSD.bfloat16(), valid_BS)
        out_BSD.float().sum().backward()
        assert out_BSD.dtype == torch.bfloat16
        assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


def test_backward_is_deterministic() -> None:
    def gradients() -> list[Tensor | None]:
        moe = build(balance_loss_weight=0.3, z_loss_weight=0.2)
        generator = torch.Generator().manual_seed(4)
        x_BSD = torch.randn(2, 256, D, generator=generator)
        moe.router.selection_bias.zero_()
        moe(x_BSD, torch.ones(2, 256, dtype=torch.bool)).square().sum().backward()
        return [p.grad for p in moe.parameters()]

    for x, y in zip(gradients(), gradients(), strict=True):
        assert x is not None
        assert y is not None
        assert torch.equal(x, y)
