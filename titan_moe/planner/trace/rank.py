"""One rank of a run, without its memory: built as it would be, and taken through a steady step.

S sequence.
"""

import resource
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from titan_moe.config.sections import RunConfig
from titan_moe.mesh import Meshes
from titan_moe.optim import build_optimizer
from titan_moe.parallelize import assemble, shard_on_meta
from titan_moe.planner.case import Case
from titan_moe.planner.figures import RankMemory
from titan_moe.planner.message import Message
from titan_moe.planner.trace.counts import Moment, messages_of, whole_step
from titan_moe.planner.trace.groups import Groups
from titan_moe.planner.trace.kernels import use_gpu_kernels
from titan_moe.planner.trace.marks import Marks
from titan_moe.planner.trace.pretend import Everything, balanced, heat, pretended_world
from titan_moe.planner.trace.recorder import Recorder
from titan_moe.planner.trace.short import Cut, unshards

Kernel = Literal["gpu", "cpu"]
BATCH = ("tokens", "labels", "positions", "document_ids")


@dataclass(frozen=True)
class RankTrace:
    """messages, FLOPs: of a whole step. peak_bytes: of this process so far."""

    memory: RankMemory
    messages: tuple[Message, ...]
    matmul_flops: int
    attention_flops: int
    peak_bytes: int


def trace_rank(case: Case, pipeline_rank: int, kernel: Kernel) -> RankTrace:
    """Of the first rank that has that stage. This process must have no process group."""
    cut = Cut.of(case, pipeline_rank)
    config = balanced(cut.config(case))
    with pretended_world(case, pipeline_rank * case.layout.stage_ranks):
        meshes = Meshes.build(case.layout, "cpu")
        parts = shard_on_meta(config, case.recipe, meshes)
        heat(parts, case.imbalance)
        if kernel == "gpu":
            use_gpu_kernels(parts)
        stages = [s.index for s in case.stages if case.holders[s.index] == pipeline_rank]
        # Numbers of tokens and rows, which no size depends on: large enough for a mean over ranks.
        recorder = Recorder(Groups(meshes), read=case.layout.world)
        marks = Marks(recorder, parts, stages)
        # On meta they were built without the mode, which makes what it is given its own.
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake, recorder, recorder.ledger.watching_sizes(), marks.set():
            _run(parts, config, meshes, recorder)
    gathers = _gathers(case, pipeline_rank, cut)
    flops = whole_step(recorder.flops, cut, gathers)
    return RankTrace(
        _memory(pipeline_rank, recorder, marks, case, cut),
        messages_of(whole_step(recorder.messages, cut, gathers)),
        flops["matmul"],
        flops["attention"],
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _run(parts: list[nn.Module], config: RunConfig, meshes: Meshes, recorder: Recorder) -> None:
    """A step like any but the first, in which optimizer states come into being."""
    ledger, device = recorder.ledger, torch.device("cpu")
    with ledger.making("weights"):
        engine = assemble(parts, config, meshes, device, loaded=Everything())
    optimizer = build_optimizer(engine.parts, config.optimizer)
    with ledger.making("optimizer"):
        for parameter in engine.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    recorder.forget()
    engine.forward_backward(_batch(config, meshes))
    engine.clip_grads(engine.grad_norm(), config.training.max_norm)
    with recorder.during(Moment("optimizer")), ledger.making("optimizer"):
        optimizer.step()
    optimizer.zero_grad()
    engine.update_routers()


def _batch(config: RunConfig, meshes: Meshes) -> dict[str, Tensor]:
    """This rank's rows of the step, whole."""
    training = config.training
    shape = (training.global_batch_size // meshes.dp_degree, training.seq_len)
    return {name: torch.zeros(shape, dtype=torch.int64) for name in BATCH}


def _memory(
    pipeline_rank: int, recorder: Recorder, marks: Marks, case: Case, cut: Cut
) -> RankMemory:
    """At the peak, and what a step has more of that is not cut: messages' places, tokens."""
    peak = recorder.ledger.peak
    left_out = Fraction(cut.whole_micro_batches, cut.micro_batches) - 1
    rows = case.rows_per_step - case.rows_per_micro_batch * cut.micro_batches * cut.passes
    row_bytes = case.config.training.seq_len * torch.int64.itemsize * len(BATCH)
    return RankMemory(
        pipeline_rank=pipeline_rank,
        weights=peak["weights"],
        gradients=peak["gradients"],
        optimizer=peak["optimizer"],
        activations=peak["activations"] + rows * row_bytes + int(marks.kept_bytes * left_out),
        buffers=peak["buffers"] + int(marks.received_bytes * left_out),
        when=recorder.ledger.peak_when,
    )


def _gathers(case: Case, rank: int, cut: Cut) -> dict[int, Fraction]:
    """By stage, how many times more often than traced a whole pass gathers its weights."""
    if cut.micro_batches == cut.whole_micro_batches:
        return dict.fromkeys(range(len(case.stages)), Fraction(1))
    section = case.config.parallelism
    few = unshards(section, rank, cut.micro_batches)
    whole = unshards(section, rank, cut.whole_micro_batches)
    return {stage: Fraction(whole[stage], few[stage]) for stage in few}
