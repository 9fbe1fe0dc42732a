"""The same training as one process does it by the book: no engine, shards or micro-batches.

The whole batch goes through a plain model at once. Cross-entropy and balance losses are written out
from their definitions and added up in one number that autograd differentiates; the layers' own
balance machinery is switched off. Only the initial values come from the code under test.

T valid tokens of one sequence, E experts.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.parity.ahead import Chain, chains, hidden_ahead
from tests.parity.cases import MAX_NORM, STEPS, Case, config_of
from tests.parity.run import VALIDATED, Trace, gradients_of, whole
from tests.parity.tiny import FAMILIES, Family, batch_of_step
from tests.tolerances import PARITY_MIN_GAP
from titan_moe.layers.moe import MoE
from titan_moe.parallel.initialise import initialise
from titan_moe.recipe import load_recipe


class Step(NamedTuple):
    """loss, balance_loss, mtp_loss: in nats per label, 0-d. counts_LE: tokens of each expert."""

    loss: Tensor
    balance_loss: Tensor
    counts_LE: Tensor
    mtp_loss: Tensor


class Reference:
    """gap: the smallest distance so far, in scores, between a choice taken and the next best.

    idle: how often a row sent no token to an expert: ranks with few rows then have none for it.
    """

    def __init__(self, family: str = "deepseek_v3", seed: int | None = None) -> None:
        self.family: Family = FAMILIES[family]
        cfg = self.family.model
        self.model: Any = load_recipe(cfg.recipe).load_model_class()(
            cfg, layers=range(cfg.num_layers), has_embedding=True, has_head=True
        )
        initialise(self.model, self.family.seed if seed is None else seed)
        self.moes = [module for module in self.model.modules() if isinstance(module, MoE)]
        self.logits: list[Tensor] = []
        for moe in self.moes:
            moe.balance_loss_weight = moe.z_loss_weight = 0.0
            moe.router.register_forward_hook(self._keep_logits)
        adam = config_of(Case(family)).optimizer
        named = list(self.model.named_parameters())
        matrices = [p for name, p in named if p.ndim >= 2 and not name.endswith("bias")]
        vectors = [p for name, p in named if p.ndim < 2 or name.endswith("bias")]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": adam.weight_decay}, {"params": vectors}],
            lr=adam.lr,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=0.0,
            foreach=False,
        )
        self.gap, self.idle = float("inf"), 0
        self.step_before: Tensor | None = None

    def _keep_logits(self, module: nn.Module, inputs: object, logits_TE: Tensor) -> None:
        self.logits.append(logits_TE)

    def hidden(self, batch: dict[str, Tensor]) -> Tensor:
        """hidden_BSD of the blocks; keeps no router's logits but theirs."""
        self.logits.clear()
        hidden_BSD: Tensor = self.model(
            batch["tokens"],
            positions_BS=batch["positions"],
            document_ids_BS=batch["document_ids"],
            tokens_BS=batch["tokens"],
        )
        return hidden_BSD

    def cross_entropy(self, batch: dict[str, Tensor]) -> Tensor:
        """In nats per label."""
        return cross_entropy(self.model.head.logits(self.hidden(batch)), batch["labels"])

    def losses(self, batch: dict[str, Tensor], ahead: list[Chain]) -> tuple[Tensor, list[Tensor]]:
        """In nats per label: cross-entropy of the model, and of each layer that predicts ahead."""
        hidden_BSD = self.hidden(batch)
        loss = cross_entropy(self.model.head.logits(hidden_BSD), batch["labels"])
        normed = hidden_ahead(self.model, hidden_BSD, batch, ahead)
        return loss, [
            cross_entropy(self.model.head.output(normed_BSD), chain.labels_BS)
            for normed_BSD, chain in zip(normed, ahead, strict=True)
        ]

    def step(self, batch: dict[str, Tensor]) -> Step:
        """Gradients of one step."""
        self.optimizer.zero_grad()
        ahead = chains(batch, self.family.mtp_layers)
        loss, of_depths = self.losses(batch, ahead)
        mtp_loss = sum(of_depths, torch.zeros(())) / max(len(of_depths), 1)
        balance_loss = torch.zeros(())
        counts = []
        valids = [batch["document_ids"] >= 0] * (len(self.moes) - len(ahead))
        valids += [chain.known_BS for chain in ahead]
        layers = zip(self.moes, self.logits, valids, strict=True)
        for index, (moe, logits_TE, valid_BS) in enumerate(layers):
            logits_BSE = logits_TE.view(*valid_BS.shape, -1)
            counts_BE = []
            for row in range(0, len(valid_BS), self.family.rows_balanced or 1):
                rows = slice(row, row + (self.family.rows_balanced or 1))
                of_rows = self._balance_loss(logits_BSE[rows][valid_BS[rows]], index)
                balance_loss = balance_loss + of_rows * len(valid_BS[rows]) / len(valid_BS)
            for logits_SE, valid_S in zip(logits_BSE, valid_BS, strict=True):
                balance_loss = balance_loss + self._z_loss(logits_SE[valid_S], index) / len(
                    valid_BS
                )
                counts_BE.append(self._count(logits_SE[valid_S], moe.router.selection_bias))
            counts.append(torch.stack(counts_BE).sum(dim=0))
            self.idle += int((torch.stack(counts_BE) == 0).sum())
        self.step_before = torch.stack(counts)
        (loss + balance_loss + self.family.mtp_weight * mtp_loss).backward()
        return Step(loss.detach(), balance_loss.detach(), torch.stack(counts), mtp_loss.detach())

    def _scores(self, logits_TE: Tensor) -> Tensor:
        """Each of E numbers by its own sigmoid, or as its part of the sum of exponentials."""
        if self.family.score_function == "sigmoid":
            return 1 / (1 + (-logits_TE).exp())
        powers_TE = logits_TE.exp()
        return powers_TE / powers_TE.sum(dim=1, keepdim=True)

    def _balance_loss(self, logits_TE: Tensor, layer: int) -> Tensor:
        """Of the tokens of one or more sequences: DeepSeek-V3's equations 17 to 20, weighted; or
        with what each expert was sent in the whole step before for what is chosen now.
        """
        tokens, num_experts = logits_TE.shape
        if tokens == 0:
            return logits_TE.sum()
        top_k, scores_TE = self.family.model.top_k, self._scores(logits_TE)
        balance = logits_TE.new_zeros(())
        for expert in range(num_experts):
            if self.family.rows_balanced is not None:
                chosen = sum(expert in row.topk(top_k).indices.tolist() for row in scores_TE)
                f = chosen * num_experts / (top_k * tokens)
            elif self.step_before is not None:
                before_E = self.step_before[layer].tolist()
                f = before_E[expert] * num_experts / sum(before_E)
            else:
                f = 0.0
            p = (scores_TE[:, expert] / scores_TE.sum(dim=1)).mean()
            balance = balance + f * p
        return self.family.balance[layer] * balance

    def _z_loss(self, logits_TE: Tensor, layer: int) -> Tensor:
        """Of one sequence: ST-MoE's equation 5, weighted."""
        if len(logits_TE) == 0:
            return logits_TE.sum()
        squares = logits_TE.exp().sum(dim=1).log().square()
        return self.family.z_loss[layer] * squares.mean()

    def _count(self, logits_TE: Tensor, bias_E: Tensor) -> Tensor:
        """Tokens per expert by group-limited choice, token by token; keeps the smallest gap."""
        cfg = self.family.model
        counts_E = torch.zeros(cfg.num_experts, dtype=torch.int64)
        size = cfg.num_experts // self.family.groups
        for scores_E in self._scores(logits_TE.detach()):
            preference = (scores_E + bias_E).tolist()
            groups = [preference[g : g + size] for g in range(0, len(preference), size)]
            group_scores = [sum(sorted(group)[-2:]) for group in groups]
            kept = self._best(group_scores, self.family.limited_groups)
            allowed = [e for e in range(len(preference)) if e // size in kept]
            best = self._best([preference[e] for e in allowed], cfg.top_k)
            for index in best:
                counts_E[allowed[index]] += 1
            self._best(scores_E.tolist(), cfg.top_k)  # the balance loss marks by score alone
        return counts_E

    def _best(self, values: list[float], k: int) -> list[int]:
        order = sorted(range(len(values)), key=lambda index: -values[index])
        if k < len(values):
            self.gap = min(self.gap, values[order[k - 1]] - values[order[k]])
        return order[:k]

    def train(self, steps: int = STEPS) -> Trace:
        trace = Trace()
        for step in range(steps):
            loss, balance_loss, counts_LE, mtp_loss = self.step(batch_of_step(step))
            trace.gradients.append(gradients_of(self.model))
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
            self.optimizer.step()
            with torch.no_grad():
                for moe, rate, counts_E in zip(
                    self.moes, self.family.bias_rate, counts_LE, strict=True
                ):
                    below_mean_E = torch.sign(counts_E.double().mean() - counts_E.double())
                    moe.router.selection_bias += rate * below_mean_E.float()
                if step == 0:
                    self.model.eval()
                    trace.validation = self.cross_entropy(batch_of_step(VALIDATED)).item()
                    self.model.train()
            trace.loss.append(loss.item())
            trace.balance_loss.append(balance_loss.item())
            trace.norm.append(norm.item())
            if self.family.mtp_layers:
                trace.mtp_loss.append(mtp_loss.item())
            trace.counts.append(counts_LE)
        trace.weights = {name: whole(p) for name, p in self.model.named_parameters()}
        trace.bias = torch.stack([moe.router.selection_bias for moe in self.moes])
        return trace


def cross_entropy(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Mean over labels other than -100 of logsumexp(logits) - logit of the label."""
    chosen = labels_BS != -100
    logits_TV, labels_T = logits_BSV[chosen], labels_BS[chosen]
    nats_T = logits_TV.logsumexp(dim=1) - logits_TV.gather(1, labels_T[:, None]).squeeze(1)
    return nats_T.sum() / max(len(labels_T), 1)


@cache
def reference(family: str, steps: int = STEPS) -> Trace:
    """By the book, once per session."""
    run = Reference(family)
    trace = run.train(steps)
    seed = run.family.seed
    assert run.gap >= PARITY_MIN_GAP, f"seed {seed} nearly ties: {run.gap:.1e}; take another"
    assert run.idle > 0, f"seed {seed}: no row leaves an expert without a token"
    return trace
