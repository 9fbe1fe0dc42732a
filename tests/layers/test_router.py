"""Selection and weights against a loop over tokens that reads like the paper.

T tokens, D hidden, E experts, K experts chosen per token.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.layers.helpers import error, fill
from tests.tolerances import FP32_REORDERED
from titan_moe.layers.router import Router

SETTINGS: dict[str, dict[str, Any]] = {
    "groups": {"num_groups": 4, "num_limited_groups": 2},
    "one group": {},
    "one of many groups": {"num_groups": 4, "num_limited_groups": 1},
    "groups of one": {"num_groups": 12, "num_limited_groups": 5},
    "softmax": {"score_function": "softmax", "num_groups": 3, "num_limited_groups": 2},
    "not normalised": {"normalize_weights": False},
}


def build(**changes: Any) -> Router:
    settings = {"score_function": "sigmoid", "normalize_weights": True, "route_scale": 2.5}
    router: Router = fill(Router(16, 12, 3, std=0.4, **{**settings, **changes}))
    router.selection_bias.copy_(torch.randn(12) * 0.3)
    return router


def route(router: Router, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ids_TK, weights_TK, counts_E."""
    counts_E = torch.zeros(12, dtype=torch.int64)
    scores_TE = router.scores(router(x_TD))
    counted_T = torch.ones(len(x_TD), dtype=torch.bool)
    ids_TK = router.select(scores_TE, counted_T, counts_E, round_robin=False)
    return ids_TK, router.weights(scores_TE, ids_TK), counts_E


def by_hand(router: Router, x_D: Tensor) -> dict[int, float]:
    """Expert -> weight of one token, in Python numbers."""
    logits = [sum(w * x for w, x in zip(row, x_D.tolist(), strict=True)) for row in
              router.weight.tolist()]  # fmt: skip
    exps = torch.tensor(logits, dtype=torch.float64).exp()
    scores = (
        exps / (1 + exps) if router.score_function == "sigmoid" else exps / exps.sum()
    ).tolist()
    wanted = [s + b for s, b in zip(scores, router.selection_bias.tolist(), strict=True)]
    size = len(wanted) // router.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(router.num_groups)]
    groups.sort(key=lambda group: -sum(sorted((wanted[e] for e in group), reverse=True)[:2]))
    allowed = [e for group in groups[: router.num_limited_groups] for e in group]
    chosen = sorted(allowed, key=lambda e: -wanted[e])[: router.top_k]
    total = sum(scores[e] for e in chosen) if router.normalize_weights else 1.0
    return {e: router.route_scale * scores[e] / total for e in chosen}


@pytest.mark.parametrize("name", SETTINGS)
def test_routing_equals_a_loop_over_tokens(name: str) -> None:
    router = build(**SETTINGS[name])
    x_TD = torch.randn(40, 16)
    ids_TK, weights_TK, counts_E = route(router, x_TD)
    expected = [by_hand(router, x_D) for x_D in x_TD]
    for ids_K, weights_K, hand in zip(ids_TK, weights_TK, expected, strict=True):
        got = dict(zip(ids_K.tolist(), weights_K.tolist(), strict=True))
        assert got == pytest.approx(hand, rel=1e-4)
    assert counts_E.tolist() == [sum(e in hand for hand in expected) for e in range(12)]


def test_the_bias_chooses_and_does_not_weigh() -> None:
    router = build()
    x_TD = torch.randn(40, 16)
    router.selection_bias.zero_()
    router.selection_bias[7] = 10.0
    ids_TK, weights_TK, _ = route(router, x_TD)
    assert (ids_TK == 7).any(dim=1).all()
    assert error(weights_TK.sum(dim=1), torch.full((40,), 2.5)) < FP32_REORDERED
    chosen = router.scores(router(x_TD)).gather(1, ids_TK)
    assert error(weights_TK, chosen / chosen.sum(1, keepdim=True) * 2.5) < FP32_REORDERED


def test_groups_whose_experts_are_all_unwanted_stay_out() -> None:
    """A bias far below zero must not make experts outside the best groups look better."""
    router = build(num_groups=4, num_limited_groups=2)
    router.selection_bias.fill_(-5.0)
    ids_TK, _, _ = route(router, torch.randn(40, 16))
    assert all(len({e // 3 for e in ids_K.tolist()}) <= 2 for ids_K in ids_TK)


def test_weights_without_any_score_are_finite() -> None:
    router = build()
    weights_TK = router.weights(torch.zeros(2, 12), torch.tensor([[0, 1, 2], [3, 4, 5]]))
    assert torch.equal(weights_TK, torch.zeros(2, 3))


def test_round_robin_follows_from_shapes_alone() -> None:
    router, counts_E = build(), torch.zeros(12, dtype=torch.int64)
    scores_TE, counted_T = torch.rand(8, 12), torch.ones(8, dtype=torch.bool)
    ids_TK = router.select(scores_TE, counted_T, counts_E, round_robin=True)
    assert ids_TK.tolist() == [[(t * 3 + k) % 12 for k in range(3)] for t in range(8)]
    assert counts_E.tolist() == [2] * 12


def test_counts_are_exact_beyond_what_floats_hold() -> None:
    router, counts_E = build(), torch.full((12,), 2**53 + 1)
    scores_TE, counted_T = torch.rand(4, 12), torch.tensor([True, True, False, True])
    ids_TK = router.select(scores_TE, counted_T, counts_E, round_robin=False)
    added = torch.bincount(ids_TK[counted_T].flatten(), minlength=12)
    assert torch.equal(counts_E - (2**53 + 1), added)


def test_casting_a_model_leaves_its_router_alone() -> None:
    router = build()
    router.selection_bias[0] = 0.123456
    weight, bias = router.weight.detach().clone(), router.selection_bias.clone()
    for cast in (copy.deepcopy(router).bfloat16(), copy.deepcopy(router).to(torch.float16)):
        assert torch.equal(cast.weight, weight)
        assert torch.equal(cast.selection_bias, bias)
        assert cast(torch.randn(2, 16).bfloat16()).dtype == torch.float32
    assert router.to("meta").weight.is_meta


def test_bf16_inputs_are_scored_in_fp32() -> None:
    router = build()
    x_TD = torch.randn(40, 16).bfloat16()
    truth = x_TD.double() @ router.weight.double().T
    assert error(router(x_TD), truth) < FP32_REORDERED
