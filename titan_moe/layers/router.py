"""Which experts a token visits, and with which weights (DeepSeek-V3, arXiv 2412.19437, 2.1.2).

Selection is an operator of its own, because it also counts: a recomputed forward must find the
selection saved (see `ROUTING_OPS`), and neither choose again between near-ties nor count twice.

B batch, S sequence, T = B·S tokens, D hidden, E experts, K experts chosen per token, G groups.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_moe.layers import balance
from titan_moe.layers.init import Constant, Init, Normal

NORMALIZER_EPS = 1e-20  # as published; all chosen scores may underflow together


class FixedDtype(nn.Module):
    """A module whose own parameters and buffers keep their dtype when a model is cast."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        def keep_dtype(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        if recurse:
            for child in self.children():
                child._apply(fn)
        return super()._apply(keep_dtype, recurse=False)


class Router(FixedDtype):
    """Logits, scores and selection. All of it is fp32, whatever the model's dtype.

    num_groups, num_limited_groups: experts come in num_groups equal groups, and a token's experts
        from num_limited_groups of them; a group's score is the sum of its two best experts'.
    normalize_weights: chosen weights sum to 1 before route_scale multiplies them.
    bias: a learned one, added to the logits.

    Buffer selection_bias: added to scores to choose, never to weigh; no gradient.
    """

    inits: dict[str, Init]
    selection_bias: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        num_groups: int = 1,
        num_limited_groups: int = 1,
        score_function: Literal["sigmoid", "softmax"],
        normalize_weights: bool,
        route_scale: float,
        std: float,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.num_groups, self.num_limited_groups = num_groups, num_limited_groups
        self.score_function = score_function
        self.normalize_weights = normalize_weights
        self.route_scale = route_scale
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=torch.float32))
        self.register_buffer("selection_bias", torch.empty(num_experts, dtype=torch.float32))
        self.inits = {"weight": Normal(std), "selection_bias": Constant(0.0)}
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(num_experts, dtype=torch.float32))
            self.inits["bias"] = Constant(0.0)

    def forward(self, x_TD: Tensor) -> Tensor:
        """logits_TE, fp32."""
        return F.linear(x_TD.float(), self.weight, self.bias)

    def scores(self, logits_TE: Tensor) -> Tensor:
        if self.score_function == "sigmoid":
            return logits_TE.sigmoid()
        return logits_TE.softmax(dim=-1)

    def select(
        self, scores_TE: Tensor, counted_T: Tensor, counts_E: Tensor, *, round_robin: bool
    ) -> Tensor:
        """expert_ids_TK, int64; adds to counts_E where counted_T.

        round_robin: choice k of token t is expert (t·K + k) mod E, whatever the scores.
        """
        return select_experts(
            scores_TE.detach(),
            self.selection_bias,
            counted_T,
            counts_E,
            self.top_k,
            self.num_groups,
            self.num_limited_groups,
            round_robin,
        )

    def weights(self, scores_TE: Tensor, expert_ids_TK: Tensor) -> Tensor:
        """weights_TK, fp32: the chosen scores without bias, normalised and scaled as configured."""
        weights_TK = scores_TE.gather(1, expert_ids_TK)
        if self.normalize_weights:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + NORMALIZER_EPS)
        return weights_TK * self.route_scale


@torch.library.custom_op("titan_moe::select_experts", mutates_args={"counts_E"})
def select_experts(
    scores_TE: Tensor,
    bias_E: Tensor,
    counted_T: Tensor,
    counts_E: Tensor,
    top_k: int,
    num_groups: int,
    num_limited_groups: int,
    round_robin: bool,
) -> Tensor:
    """See `Router.select`. counts_E is int64 and exact: a choice adds 1 where its token counts."""
    tokens, num_experts = scores_TE.shape
    if round_robin:
        choices = torch.arange(tokens * top_k, device=scores_TE.device)
        expert_ids_TK = (choices % num_experts).view(tokens, top_k)
    else:
        preference_TE = scores_TE + bias_E
        if num_limited_groups < num_groups:
            preference_TE = _within_best_groups(preference_TE, num_groups, num_limited_groups)
        expert_ids_TK = preference_TE.topk(top_k, dim=-1).indices
    ones_TK = counted_T.to(torch.int64)[:, None].expand(-1, top_k)
    counts_E.index_add_(0, expert_ids_TK.flatten(), ones_TK.flatten())
    return expert_ids_TK


@select_experts.register_fake
def _(
    scores_TE: Tensor,
    bias_E: Tensor,
    counted_T: Tensor,
    counts_E: Tensor,
    top_k: int,
    num_groups: int,
    num_limited_groups: int,
    round_robin: bool,
) -> Tensor:
    return scores_TE.new_empty(scores_TE.shape[0], top_k, dtype=torch.int64)


def _within_best_groups(preference_TE: Tensor, num_groups: int, num_limited_groups: int) -> Tensor:
    """-inf outside the best groups of each token."""
    grouped_TGe = preference_TE.unflatten(1, (num_groups, -1))
    best_of_group = min(2, grouped_TGe.shape[2])
    group_scores_TG = grouped_TGe.topk(best_of_group, dim=-1).values.sum(dim=-1)
    groups = group_scores_TG.topk(num_limited_groups, dim=-1).indices
    outside_TG = torch.ones_like(group_scores_TG, dtype=torch.bool).scatter_(1, groups, False)
    return grouped_TGe.masked_fill(outside_TG[..., None], float("-inf")).flatten(1)


ROUTING_OPS = {torch.ops.titan_moe.select_experts.default, *balance.OPS}
"""Operators whose results recomputation must save: they choose, or add to a buffer. A dispatcher
may add its own, so that sizes are agreed on once per forward and not per recomputation."""
