"""The matrix: ways to lay one training over processes, which must all give the same numbers."""

from dataclasses import replace

from tests.parity.cases import Case

GQ, MTP = "grouped_query", "deepseek_v3_mtp"
GROUPS, STEPS = "balance_of_groups", "balance_of_steps"

DATA = [
    Case(),
    Case(recompute="full", accumulation=4),
    Case(shards=2),
    Case(shards=4, accumulation=4),
    Case(shards=4, recompute="full", reshard="never"),
    Case(replicas=2, shards=2),
    Case(replicas=2, shards=2, accumulation=4, recompute="full"),
    Case(replicas=4),
    Case(GQ),
    Case(GQ, shards=4, accumulation=2, recompute="full"),
]

TENSOR = [
    Case(tp=2),
    Case(tp=4),
    Case(tp=2, sequence_parallel=False),
    Case(tp=2, loss_parallel=False),
    Case(tp=2, shards=2, accumulation=2),
    Case(tp=2, shards=2, recompute="full"),
    Case(tp=2, replicas=2, sequence_parallel=False, loss_parallel=False),
    Case(GQ, tp=4),
    Case(GQ, tp=2, shards=2),
    Case(GQ, tp=4, sequence_parallel=False),
]

EXPERT = [
    Case(shards=2, ep=2),
    Case(shards=4, ep=4, accumulation=2),
    Case(shards=4, ep=2),
    Case(shards=4, ep=4, recompute="full"),
    Case(shards=4, ep=2, max_expert_tokens=16),
    Case(replicas=2, shards=2, ep=2),
    Case(shards=4, ep=4, backend="two_tier", scale_up=2),
    Case(shards=4, ep=4, backend="two_tier", scale_up=2, recompute="full", accumulation=2),
    Case(GQ, shards=4, ep=4),
    Case(GQ, shards=4, ep=4, backend="two_tier", scale_up=2),
    Case(GQ, replicas=2, shards=2, ep=2),
]

CONTEXT = [
    Case(cp=2),
    Case(cp=4, accumulation=2),
    Case(cp=2, balancer="none"),
    Case(cp=2, shards=2, recompute="full"),
    Case(GQ, cp=4),
    Case(GQ, cp=2, replicas=2),
]

PIPELINE = [
    Case(pp=2, schedule="GPipe"),
    Case(pp=2, schedule="1F1B", accumulation=2),
    Case(pp=4, schedule="1F1B", layers=(1, 1, 1, 1)),
    Case(pp=2, schedule="1F1B", layers=(1, 3), recompute="full"),
    Case(pp=2, schedule="Interleaved1F1B", stages_per_rank=2),
    Case(pp=2, schedule="LoopedBFS", stages_per_rank=2),
    Case(pp=2, schedule="InterleavedZeroBubble", stages_per_rank=2),
    Case(pp=2, schedule="ZBVZeroBubble"),
    Case(pp=2, schedule="DualPipeV"),
    Case(pp=2, schedule="ZBVZeroBubble", recompute="full", microbatch=4),
    Case(pp=2, schedule="CSV", microbatch=4),
    Case(pp=2, shards=2, schedule="1F1B", reshard="always"),
    Case(GQ, pp=2, schedule="1F1B"),
    Case(GQ, pp=2, shards=2, schedule="Interleaved1F1B", stages_per_rank=2, accumulation=2),
    Case(GQ, pp=2, schedule="ZBVZeroBubble"),
    Case(GQ, pp=2, schedule="DualPipeV", microbatch=4),
    Case(GQ, pp=4, schedule="1F1B"),
]

PRODUCTS = [
    Case(tp=2, shards=2, ep=4),
    Case(tp=4, ep=4),
    Case(tp=2, shards=2, ep=2, sequence_parallel=False),
    Case(GQ, tp=2, shards=2, ep=4, accumulation=2),
    Case(cp=2, ep=2),
    Case(cp=2, shards=2, ep=4),
    Case(GQ, cp=2, shards=2, ep=2),
    Case(tp=2, cp=2),
    Case(GQ, tp=2, cp=2, ep=4),
    Case(tp=2, pp=2),
    Case(GQ, tp=2, pp=2, schedule="DualPipeV"),
    Case(cp=2, pp=2, schedule="Interleaved1F1B", stages_per_rank=2),
    Case(ep=2, shards=2, pp=2, schedule="ZBVZeroBubble"),
    Case(ep=2, shards=2, pp=2, schedule="ZBVZeroBubble", max_expert_tokens=5, recompute="full"),
    Case(GQ, replicas=2, pp=2, schedule="DualPipeV", microbatch=1, accumulation=2),
    # Eight processes.
    Case(pp=2, shards=4, ep=2),
    Case(GQ, pp=2, shards=4, ep=2, schedule="1F1B"),
    Case(tp=2, cp=2, pp=2),
    Case(tp=2, cp=2, shards=2, ep=8),
    Case(shards=8, ep=8, backend="two_tier", scale_up=4),
    Case(replicas=2, shards=2, tp=2, ep=4, backend="two_tier", scale_up=2),
]

AHEAD = [
    Case(MTP),
    Case(MTP, shards=2, recompute="full", accumulation=2),
    Case(MTP, replicas=2, shards=2),
    Case(MTP, tp=2),
    Case(MTP, tp=2, sequence_parallel=False, loss_parallel=False),
    Case(MTP, cp=2, recompute="full"),
    Case(MTP, shards=4, ep=4, max_expert_tokens=16),
    Case(MTP, pp=2, schedule="1F1B", accumulation=2),
    Case(MTP, pp=2, schedule="Interleaved1F1B", stages_per_rank=2),
    Case(MTP, pp=2, schedule="ZBVZeroBubble", recompute="full", microbatch=4),
    Case(MTP, pp=2, schedule="DualPipeV"),
    Case(MTP, pp=2, shards=2, ep=2, schedule="1F1B", reshard="always"),
    Case(MTP, tp=2, cp=2, pp=2),
]

BALANCE = [
    Case(GROUPS),
    Case(GROUPS, shards=4, ep=2, accumulation=2, recompute="full"),
    Case(GROUPS, tp=2, cp=2),
    Case(GROUPS, pp=2, shards=2),
    Case(STEPS),
    Case(STEPS, shards=4, accumulation=4),
    Case(STEPS, tp=2, sequence_parallel=False),
    Case(STEPS, cp=2, ep=2),
    Case(STEPS, pp=2, shards=2, schedule="ZBVZeroBubble", recompute="full"),
]

LAYOUTS = [*DATA, *TENSOR, *EXPERT, *CONTEXT, *PIPELINE, *PRODUCTS, *AHEAD, *BALANCE]
assert len(set(LAYOUTS)) == len(LAYOUTS) >= 40


def in_one_process(case: Case) -> Case:
    """The same training, laid over nothing."""
    return replace(Case(), family=case.family)
