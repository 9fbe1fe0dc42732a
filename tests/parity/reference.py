"""The same training as one process does it by the book: no engine, shards or micro-batches.

The whole batch goes through a plain model at once. Cross-entropy and balance losses are written out
from their definitions and added up in one number that autograd differentiates; the layers' own
balance machinery is switched off. Only the initial values come from the code under test.

T valid tokens of one sequence, E experts.
"""

import torch
from torch import Tensor, nn

from recipes.deepseek_v3.model import Model
from tests.parity.tiny import (
    MAX_NORM,
    MODEL,
    STEPS,
    Case,
    Trace,
    batch_of_step,
    config_of,
    gradients_of,
)
from titan_moe.layers.moe import MoE
from titan_moe.parallel.initialise import initialise


class Reference:
    """gap: the smallest distance so far, in scores, between a choice taken and the next best."""

    def __init__(self, seed: int) -> None:
        layers = range(MODEL.num_layers)
        self.model = Model(MODEL, layers=layers, has_embedding=True, has_head=True)
        initialise(self.model, seed)
        self.moes = [module for module in self.model.modules() if isinstance(module, MoE)]
        self.logits: list[Tensor] = []
        for moe in self.moes:
            moe.balance_loss_weight = moe.z_loss_weight = 0.0
            moe.router.register_forward_hook(self._keep_logits)
        adam = config_of(Case(), seed).optimizer
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": adam.weight_decay}, {"params": vectors}],
            lr=adam.lr,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=0.0,
            foreach=False,
        )
        self.gap = float("inf")

    def _keep_logits(self, module: nn.Module, inputs: object, logits_TE: Tensor) -> None:
        self.logits.append(logits_TE)

    def step(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of one step -> loss, balance loss, counts of tokens [L, E]."""
        self.logits.clear()
        self.optimizer.zero_grad()
        hidden_BSD = self.model(
            batch["tokens"],
            positions_BS=batch["positions"],
            document_ids_BS=batch["document_ids"],
            tokens_BS=batch["tokens"],
        )
        loss = cross_entropy(self.model.head.logits(hidden_BSD), batch["labels"])
        valid_BS = batch["document_ids"] >= 0
        balance_loss = torch.zeros(())
        counts = []
        for moe_index, (moe, logits_TE) in enumerate(zip(self.moes, self.logits, strict=True)):
            logits_BSE = logits_TE.view(*valid_BS.shape, -1)
            weights = (MODEL.balance_loss_weight[moe_index], MODEL.z_loss_weight[moe_index])
            for logits_SE, valid_S in zip(logits_BSE, valid_BS, strict=True):
                of_sequence = auxiliary_loss(logits_SE[valid_S], *weights)
                balance_loss = balance_loss + of_sequence / len(valid_BS)
            counts.append(self._count(logits_BSE[valid_BS], moe.router.selection_bias))
        (loss + balance_loss).backward()
        return loss.detach(), balance_loss.detach(), torch.stack(counts)

    def _count(self, logits_TE: Tensor, bias_E: Tensor) -> Tensor:
        """Tokens per expert by group-limited choice, token by token; keeps the smallest gap."""
        counts_E = torch.zeros(MODEL.num_experts, dtype=torch.int64)
        size = MODEL.num_experts // MODEL.num_expert_groups
        for scores_E in logits_TE.detach().sigmoid():
            preference = (scores_E + bias_E).tolist()
            groups = [preference[g : g + size] for g in range(0, len(preference), size)]
            group_scores = [sum(sorted(group)[-2:]) for group in groups]
            kept = self._best(group_scores, MODEL.num_limited_groups)
            allowed = [e for e in range(len(preference)) if e // size in kept]
            best = self._best([preference[e] for e in allowed], MODEL.top_k)
            for index in best:
                counts_E[allowed[index]] += 1
            self._best(scores_E.tolist(), MODEL.top_k)  # the balance loss marks by score alone
        return counts_E

    def _best(self, values: list[float], k: int) -> list[int]:
        order = sorted(range(len(values)), key=lambda index: -values[index])
        self.gap = min(self.gap, values[order[k - 1]] - values[order[k]])
        return order[:k]

    def train(self, steps: int = STEPS) -> Trace:
        trace = Trace()
        for step in range(steps):
            loss, balance_loss, counts_LE = self.step(batch_of_step(step))
            if step == 0:
                trace.gradients = gradients_of(self.model)
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
            self.optimizer.step()
            with torch.no_grad():
                for moe, rate, counts_E in zip(
                    self.moes, MODEL.bias_update_rate, counts_LE, strict=True
                ):
                    below_mean_E = torch.sign(counts_E.double().mean() - counts_E.double())
                    moe.router.selection_bias += rate * below_mean_E.float()
            trace.loss.append(loss.item())
            trace.balance_loss.append(balance_loss.item())
            trace.norm.append(norm.item())
            trace.counts.append(counts_LE)
        trace.bias = torch.stack([moe.router.selection_bias for moe in self.moes])
        return trace


def cross_entropy(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Mean over labels other than -100 of logsumexp(logits) - logit of the label."""
    chosen = labels_BS != -100
    logits_TV, labels_T = logits_BSV[chosen], labels_BS[chosen]
    nats_T = logits_TV.logsumexp(dim=1) - logits_TV.gather(1, labels_T[:, None]).squeeze(1)
    return nats_T.sum() / len(labels_T)


def auxiliary_loss(logits_TE: Tensor, balance_weight: float, z_weight: float) -> Tensor:
    """Of one sequence: DeepSeek-V3's equations 17 to 20 and ST-MoE's equation 5, weighted."""
    tokens, num_experts = logits_TE.shape
    if tokens == 0:
        return logits_TE.sum()
    scores_TE = logits_TE.sigmoid()
    balance = logits_TE.new_zeros(())
    for expert in range(num_experts):
        chosen = sum(expert in row.topk(MODEL.top_k).indices.tolist() for row in scores_TE)
        f = chosen * num_experts / (MODEL.top_k * tokens)
        p = (scores_TE[:, expert] / scores_TE.sum(dim=1)).mean()
        balance = balance + f * p
    return balance_weight * balance + z_weight * logits_TE.logsumexp(dim=1).square().mean()
