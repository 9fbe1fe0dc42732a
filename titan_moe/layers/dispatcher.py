"""How tokens reach the experts they chose, and how results come back.

T tokens of this process, D hidden, K experts chosen per token, R rows for the experts held here,
E experts held here.
"""

from typing import Any, Protocol

import torch
from torch import Tensor


class Dispatcher(Protocol):
    """Another way to move tokens implements these two; a MoE layer's `dispatcher` is the slot.

    Rules: weights travel with the tokens and multiply on the expert's side, in fp32, so `combine`
    only ever sums, anywhere on the way back. Every (token, choice) arrives exactly once, and
    nothing else does: R equals the last offset, and R may be 0. Gradients flow through rows and
    weights both ways. Nothing is read on the host where shapes alone tell it. How to write one:
    docs/dispatchers.md.
    """

    def dispatch(
        self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """-> rows_RD, row_weights_R, offsets_E, handle.

        expert_ids_TK: int64, over all experts of the layer. weights_TK: fp32.
        rows_RD: x's rows sorted by expert, in x's dtype. row_weights_R: fp32, in the same order.
        offsets_E: int32, where each local expert's rows end. handle: whatever `combine` needs.
        """
        ...

    def combine(self, weighted_rows_RD: Tensor, handle: Any) -> Tensor:
        """out_TD: for each token the sum of its weighted rows (fp32), in fp32."""
        ...


class LocalDispatcher:
    """All experts are here: sort by expert and back."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def dispatch(
        self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, int]]:
        tokens, top_k = expert_ids_TK.shape
        sorted_ids_R, choice_R = expert_ids_TK.flatten().sort(stable=True)
        experts_E = torch.arange(self.num_experts, device=x_TD.device)
        offsets_E = torch.searchsorted(sorted_ids_R, experts_E, right=True, out_int32=True)
        token_R = choice_R // top_k
        rows_RD = x_TD.index_select(0, token_R)
        row_weights_R = weights_TK.flatten().index_select(0, choice_R)
        return rows_RD, row_weights_R, offsets_E, (token_R, tokens)

    def combine(self, weighted_rows_RD: Tensor, handle: tuple[Tensor, int]) -> Tensor:
        token_R, tokens = handle
        out_TD = weighted_rows_RD.new_zeros(tokens, weighted_rows_RD.shape[1])
        return out_TD.index_add(0, token_R, weighted_rows_RD)
