"""Ways to be wrong, one or more per applier: each must turn the matrix red where it says.

A control breaks the code before anything is built, by pytest's monkeypatch, in each worker.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parity.cases import Case
from tests.parity.tiny import batch_of_step
from titan_moe import parallelize
from titan_moe.layers.head import IGNORED_LABEL
from titan_moe.layers.moe import MoE
from titan_moe.mesh import Meshes
from titan_moe.parallel import (
    context,
    pending,
    pipeline,
    tensor,
    vocabulary,
)
from titan_moe.parallel.ahead import look_ahead
from titan_moe.parallel.collectives import (
    all_gather,
    all_reduce,
    all_reduce_back,
    join_slices,
    slice_of,
    summed,
)
from titan_moe.parallel.dispatch import flat, rows, two_tier
from titan_moe.parallel.engine import Engine
from titan_moe.parallel.pending import PendingSums
from titan_moe.passes import recompute

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Control:
    """red: pattern of what must be reported (see `compare.Comparison.faults`)."""

    case: Case
    break_it: Callable[[Patch], None]
    red: str

    def __str__(self) -> str:
        name = getattr(self.break_it, "func", self.break_it).__name__
        return f"{name} in {self.case}"


def experts_divided_by(patch: Patch, factor: float) -> None:
    """As FSDP would average over its ranks, or as gradients scaled by ep; in one layer alone."""
    apply_fsdp = parallelize.apply_fsdp

    def broken(model: nn.Module, *args: Any) -> None:
        apply_fsdp(model, *args)
        experts: Any = model.get_submodule("layers.1.moe.experts")
        experts.set_gradient_divide_factor(factor)

    patch.setattr(parallelize, "apply_fsdp", broken)


def replicas_forgotten(patch: Patch) -> None:
    """Gradients are summed over the shards of one replica."""
    patch.setattr(Meshes, "fsdp", lambda self, view: self.dense["dp_shard"])


def own_tokens_divide(patch: Patch) -> None:
    patch.setattr(Engine, "_sum_over_rows", lambda self, *numbers: list(map(int, numbers)))


def own_sequences_divide(patch: Patch) -> None:
    """The balance gradient then grows with the number of ranks."""
    over_ranks = Engine._sum_over_rows

    def broken(self: Engine, *numbers: Tensor) -> list[int]:
        return [*over_ranks(self, *numbers)[:1], *map(int, numbers[1:])]

    patch.setattr(Engine, "_sum_over_rows", broken)


def own_tokens_counted(patch: Patch) -> None:
    """The selection bias then follows each rank's own tokens."""

    def broken(self: Engine, own: dict[str, Tensor], *args: Any) -> Tensor:
        return torch.stack(list(own.values()))

    patch.setattr(Engine, "_over_layers", broken)


def counted_when_recomputed(patch: Patch) -> None:
    patch.setattr(recompute, "ROUTING_OPS", set())


def pending_sums_forgotten(patch: Patch) -> None:
    """Of tp: norms and routers, each rank's from its own tokens. Of pp: tied weights."""
    patch.setattr(PendingSums, "add_up", lambda self: None)


def pending_sums_in_another_group(patch: Patch) -> None:
    """Over the data-parallel ranks, of which FSDP has taken care."""
    of = PendingSums.of

    def broken(parts: list[nn.Module], meshes: Meshes) -> PendingSums:
        sums = of(parts, meshes)
        sums._tp_group = meshes.fsdp("dense").get_group()
        return sums

    patch.setattr(PendingSums, "of", broken)


def copies_all_counted(patch: Patch) -> None:
    of = PendingSums.of

    def broken(*args: Any) -> PendingSums:
        sums = of(*args)
        sums.copies = {}
        return sums

    patch.setattr(PendingSums, "of", broken)


def gathered_without_sum(patch: Patch) -> None:
    """Into a split layer under sequence parallelism; backward keeps a rank's own share only."""
    patch.setattr(tensor, "all_gather", join_slices)


def entered_without_sum(patch: Patch) -> None:
    """The same where every rank has all tokens. The first step would tell: it must not, here."""
    patch.setattr(tensor, "all_reduce_back", lambda x, group: x)
    patch.setattr(pending, "check_shares", lambda gradients, group: None)


def summed_there_and_back(patch: Patch) -> None:
    """Out of a split layer: the gradient, which all ranks have, is added up once more."""
    patch.setattr(
        tensor, "all_reduce", lambda x, group: all_reduce_back(all_reduce(x, group), group)
    )


def joined_with_sum(patch: Patch) -> None:
    """Slices of tokens or logits put together: a gradient that all ranks have is added up."""
    patch.setattr(tensor, "join_slices", all_gather)


def vocabulary_not_masked(patch: Patch) -> None:
    """Tokens and labels of another rank's part of the vocabulary count here too."""
    within = vocabulary._within

    def broken(*args: Any) -> tuple[Tensor, Tensor]:
        local_BS, own_BS = within(*args)
        return local_BS, torch.ones_like(own_BS)

    patch.setattr(vocabulary, "_within", broken)


def sequences_not_joined(patch: Patch) -> None:
    """Each rank then balances its part of a sequence as if it were a whole one."""
    patch.setattr(parallelize, "apply_sequence_balance", lambda *args: None)


def sequences_joined_over_cp_alone(patch: Patch) -> None:
    def broken(model: nn.Module, meshes: Meshes, *args: Any) -> None:
        group = meshes.dense["cp"].get_group()
        for module in model.modules():
            if isinstance(module, MoE):
                module.sum_over_sequence = partial(summed, group=group)

    patch.setattr(parallelize, "apply_sequence_balance", broken)


def rows_left_in_order(patch: Patch) -> None:
    """Experts' results go back as they lie, sorted by expert, to whoever sent something else."""

    def broken(wire: Any, rows_RD: Tensor, delivery: Any) -> Tensor:
        sizes = delivery.sizes
        copies_CD = rows.exchange(wire, rows_RD, sizes.arriving, sizes.splits)
        return rows.sum_copies(copies_CD, delivery.token_C, delivery.tokens)

    patch.setattr(flat, "give_back", broken)


def one_domain_is_enough(patch: Patch) -> None:
    """Of the domains that a token went to, one gives its sum back."""

    def broken(x_CD: Tensor, token_C: Tensor, tokens: int) -> Tensor:
        first_T = {token: place for place, token in reversed(list(enumerate(token_C.tolist())))}
        kept_C = torch.zeros(len(token_C), 1)
        kept_C[list(first_T.values())] = 1.0
        return rows.sum_copies(x_CD * kept_C, token_C, tokens)

    patch.setattr(two_tier, "sum_copies", broken)


def keys_without_sum(patch: Patch) -> None:
    """What other ranks' queries say of this rank's keys and values does not come back."""
    patch.setattr(context, "sum_slices", slice_of)


def keys_in_order_of_ranks(patch: Patch) -> None:
    """A late chunk of the first rank then stands before the second rank's early one."""
    order = context.RowOrder

    def broken(places_RS: Tensor, inverse_T: Tensor) -> Any:
        return order(places_RS, torch.arange(len(inverse_T)))

    patch.setattr(context, "RowOrder", broken)


def gradients_scaled_by_schedule(patch: Patch) -> None:
    """torch's default: the mean over micro-batches, of what is divided by all tokens already."""
    build = pipeline.torch_schedule

    def broken(*args: Any) -> Any:
        schedule = build(*args)
        schedule.scale_grads = True
        return schedule

    patch.setattr(pipeline, "torch_schedule", broken)


def own_labels_ahead_divide(patch: Patch) -> None:
    """What is ahead then weighs more, the more ranks there are."""
    over_ranks = Engine._sum_over_rows

    def broken(self: Engine, *numbers: Tensor) -> list[int]:
        return [*over_ranks(self, *numbers)[:2], *map(int, numbers[2:])]

    patch.setattr(Engine, "_sum_over_rows", broken)


def main_labels_divide_what_is_ahead(patch: Patch) -> None:
    expect = Engine._expect_ahead

    def broken(self: Engine, valid_M: list[int]) -> None:
        valid = int((batch_of_step(0)["labels"] != IGNORED_LABEL).sum())
        expect(self, [valid] * len(valid_M))

    patch.setattr(Engine, "_expect_ahead", broken)


def slices_look_ahead(patch: Patch) -> None:
    """Each rank of a row then takes what comes next among its own tokens."""
    of_batch = context.SequenceSlices.of_batch

    def broken(self: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        mine = of_batch(self, batch)
        if "next_tokens" not in mine:
            return mine
        return mine | look_ahead({"labels": mine["labels"][:, :, 0]}, depth=2)

    patch.setattr(context.SequenceSlices, "of_batch", broken)


NORMS_AND_ROUTERS = "gradient of .*(norm|router).weight"
AHEAD_PP = Case("deepseek_v3_mtp", pp=2, schedule="1F1B", accumulation=2)
AHEAD_FSDP = Case("deepseek_v3_mtp", shards=2, recompute="full", accumulation=2)
CONTROLS = [
    Control(Case(shards=2), partial(experts_divided_by, factor=2.0), r"layers.1.moe.experts"),
    Control(Case(replicas=4), partial(experts_divided_by, factor=4.0), r"layers.1.moe.experts"),
    Control(Case(replicas=2, shards=2), replicas_forgotten, "gradient of"),
    Control(Case(shards=2), own_tokens_divide, "gradient of"),
    Control(Case(shards=2), own_sequences_divide, r"gradient of .*router"),
    Control(Case(shards=2), own_tokens_counted, "selection biases"),
    Control(Case(recompute="full", accumulation=4), counted_when_recomputed, "counts of step 0"),
    Control(Case(tp=2), pending_sums_forgotten, NORMS_AND_ROUTERS),
    Control(Case("grouped_query", tp=4), pending_sums_forgotten, NORMS_AND_ROUTERS),
    Control(Case(tp=2, shards=2, accumulation=2), pending_sums_in_another_group, NORMS_AND_ROUTERS),
    Control(Case(tp=2), gathered_without_sum, "gradient of"),
    Control(Case(tp=2, sequence_parallel=False), entered_without_sum, "gradient of"),
    Control(Case(tp=2, sequence_parallel=False), summed_there_and_back, "gradient of"),
    Control(Case(tp=2, sequence_parallel=False), joined_with_sum, r"gradient of .*moe"),
    Control(Case(tp=2, loss_parallel=False), joined_with_sum, "gradient of"),
    Control(Case(tp=2), vocabulary_not_masked, r"curve of loss"),
    Control(Case(tp=2), sequences_not_joined, r"gradient of .*router"),
    Control(Case(cp=2), sequences_not_joined, r"curve of balance_loss"),
    Control(Case(tp=2, cp=2), sequences_joined_over_cp_alone, r"curve of balance_loss"),
    Control(Case(shards=4, ep=2), partial(experts_divided_by, factor=2.0), r"layers.1.moe.experts"),
    Control(Case(shards=2, ep=2), partial(experts_divided_by, factor=0.5), r"layers.1.moe.experts"),
    Control(Case(shards=2, ep=2), rows_left_in_order, "gradient of"),
    Control(
        Case(shards=4, ep=4, backend="two_tier", scale_up=2), one_domain_is_enough, "gradient of"
    ),
    Control(Case(cp=2), keys_without_sum, r"gradient of .*kv_down"),
    Control(Case(cp=2), keys_in_order_of_ranks, "gradient of"),
    Control(Case(pp=2, schedule="GPipe"), gradients_scaled_by_schedule, "gradient of"),
    Control(
        Case(pp=2, schedule="ZBVZeroBubble", recompute="full", microbatch=4),
        counted_when_recomputed,
        "counts of step 0",
    ),
    Control(Case("grouped_query", pp=2), pending_sums_forgotten, r"gradient of embedding"),
    Control(Case("grouped_query", pp=2), pending_sums_forgotten, r"copies of embedding"),
    Control(Case("grouped_query", pp=2), copies_all_counted, r"curve of norm"),
    Control(AHEAD_PP, pending_sums_forgotten, r"gradient of embedding"),
    Control(AHEAD_PP, copies_all_counted, r"curve of norm"),
    Control(AHEAD_FSDP, own_labels_ahead_divide, r"gradient of layers.5"),
    Control(AHEAD_FSDP, main_labels_divide_what_is_ahead, r"gradient of layers.4"),
    Control(AHEAD_FSDP, counted_when_recomputed, "counts of step 0"),
    Control(Case("deepseek_v3_mtp", cp=2, recompute="full"), slices_look_ahead, "mtp_loss"),
]
