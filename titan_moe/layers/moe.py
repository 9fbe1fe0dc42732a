"""The Mixture-of-Experts layer: routed experts, shared experts, and what keeps them balanced.

B batch, S sequence, T = B·S tokens, D hidden, E experts, K experts chosen per token, R rows.
"""

import torch
from torch import Tensor, nn

from titan_moe.config.model import Balance
from titan_moe.layers.balance import (
    SumOverSequence,
    accumulate,
    attach_loss,
    global_balance_loss,
    keep,
    sequence_balance_loss,
    sequence_z_loss,
)
from titan_moe.layers.dispatcher import Dispatcher, LocalDispatcher
from titan_moe.layers.experts import Experts
from titan_moe.layers.init import Constant, Init
from titan_moe.layers.router import FixedDtype, Router


class MoE(FixedDtype):
    """y = sum over chosen experts of weight·expert(x) + shared(x).

    balance_loss_weight, z_loss_weight: factors of this layer's auxiliary losses; 0: not computed.
    balance_loss_scope: what is balanced, a "sequence", the tokens of a "group" of that many rows
        side by side (balance_group_size) as if they were one sequence, or the "global" step.
    bias_update_rate: step of the selection bias per optimizer step.

    Slots: dispatcher; force_balance (route round-robin, for benchmarks); sum_over_sequence (see
    `sequence_balance_loss`).

    Buffers, written in training mode alone, in place, and never with padding:
        counts: int64 [E], tokens sent to each expert since someone zeroed it, in this process.
        previous_counts: int64 [E], saved; the last step's counts over all processes.
        balance_loss_sum: fp32 0-d, weighted auxiliary losses summed over this process's sequences,
            or parts of sequences.
        aux_scale: fp32 0-d, factor on the auxiliary losses' gradients; whoever knows the number of
            sequences in a step writes its inverse here.
    """

    inits: dict[str, Init]
    counts: Tensor
    previous_counts: Tensor
    balance_loss_sum: Tensor
    aux_scale: Tensor

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared: nn.Module | None,
        *,
        balance: Balance,
    ) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared
        self.balance_loss_weight = balance.balance_loss_weight
        self.balance_loss_scope = balance.balance_loss_scope
        self.balance_group_size = balance.balance_group_size
        self.z_loss_weight = balance.z_loss_weight
        self.bias_update_rate = balance.bias_update_rate
        self.force_balance = False
        self.dispatcher: Dispatcher = LocalDispatcher(router.num_experts)
        self.sum_over_sequence: SumOverSequence = keep

        counts_E = torch.empty(router.num_experts, dtype=torch.int64)
        scalar = torch.empty((), dtype=torch.float32)
        self.register_buffer("previous_counts", counts_E)
        self.register_buffer("counts", counts_E.clone(), persistent=False)
        self.register_buffer("balance_loss_sum", scalar, persistent=False)
        self.register_buffer("aux_scale", scalar.clone(), persistent=False)
        self.inits = {
            "previous_counts": Constant(0),
            "counts": Constant(0),
            "balance_loss_sum": Constant(0.0),
            "aux_scale": Constant(1.0),
        }

    def forward(self, x_BSD: Tensor, valid_BS: Tensor) -> Tensor:
        """valid_BS: bool, False where a token is padding: it flows, but leaves no trace."""
        x_TD = x_BSD.flatten(0, 1)
        logits_TE = self.router(x_TD)
        scores_TE = self.router.scores(logits_TE)
        counted_T = valid_BS.flatten() & self.training
        expert_ids_TK = self.router.select(
            scores_TE, counted_T, self.counts, round_robin=self.force_balance
        )
        weights_TK = self.router.weights(scores_TE, expert_ids_TK)

        rows_RD, row_weights_R, offsets_E, handle = self.dispatcher.dispatch(
            x_TD, expert_ids_TK, weights_TK
        )
        weighted_RD = self.experts(rows_RD, offsets_E, row_weights_R)
        out_BSD = self.dispatcher.combine(weighted_RD, handle).view(x_BSD.shape).to(x_BSD.dtype)

        if self.shared is not None:
            out_BSD = out_BSD + self.shared(x_BSD)
        if self.training and (self.balance_loss_weight or self.z_loss_weight):
            out_BSD = self._with_auxiliary_losses(out_BSD, logits_TE, scores_TE, valid_BS)
        return out_BSD

    def _with_auxiliary_losses(
        self, out_BSD: Tensor, logits_TE: Tensor, scores_TE: Tensor, valid_BS: Tensor
    ) -> Tensor:
        loss = logits_TE.new_zeros(())
        if self.balance_loss_weight:
            loss = loss + self.balance_loss_weight * self._balance_loss(scores_TE, valid_BS)
        if self.z_loss_weight:
            logits_BSE = logits_TE.view(*valid_BS.shape, -1)
            loss_B = sequence_z_loss(logits_BSE, valid_BS, self.sum_over_sequence)
            loss = loss + self.z_loss_weight * loss_B.sum()
        accumulate(loss.detach(), self.balance_loss_sum)
        return attach_loss(out_BSD, loss, self.aux_scale)

    def _balance_loss(self, scores_TE: Tensor, valid_BS: Tensor) -> Tensor:
        """Summed over sequences; a group's counts as often as it has sequences."""
        size = self.balance_group_size
        assert len(valid_BS) % size == 0, "a micro-batch that does not hold whole groups"
        valid_GS = valid_BS.reshape(len(valid_BS) // size, -1)
        scores_GSE = scores_TE.view(*valid_GS.shape, -1)
        if self.balance_loss_scope == "global":
            loss_G = global_balance_loss(
                scores_GSE, valid_GS, self.previous_counts, self.sum_over_sequence
            )
        else:
            loss_G = sequence_balance_loss(
                scores_GSE, valid_GS, self.router.top_k, self.sum_over_sequence
            )
        return size * loss_G.sum()

    @torch.no_grad()
    def update_selection_bias(self, global_counts_E: Tensor) -> None:
        """Once per optimizer step: bias += rate · sign(mean − counts), and remember the counts.

        global_counts_E: int64, this step's tokens per expert over all processes.
        """
        below_mean_E = (global_counts_E.sum() - global_counts_E * len(global_counts_E)).sign()
        self.router.selection_bias.add_(below_mean_E, alpha=self.bias_update_rate)
        self.previous_counts.copy_(global_counts_E)
