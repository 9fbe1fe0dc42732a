"""A run saved under one layout and loaded under another: the same state, the same next losses."""

import math
from pathlib import Path

import pytest
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.checkpoint.stand_in import assert_same
from tests.parity.cases import MAX_NORM, Case, config_of
from tests.parity.run import build, rows_of, whole
from tests.parity.tiny import batch_of_step
from tests.tolerances import LOADED_LOSS_RTOL
from titan_moe.check.pool import Pool
from titan_moe.checkpoint.checkpointer import Checkpointer
from titan_moe.config.sections import Checkpoint
from titan_moe.optim import build_optimizer
from titan_moe.world import gather

Values = dict[str, Tensor]
GQ = "grouped_query"

PAIRS = [
    (Case(shards=2, ep=2), Case()),
    (Case(shards=2, ep=2), Case(shards=4, ep=4, backend="two_tier", scale_up=2)),
    (Case(shards=2, ep=2), Case(tp=2)),
    (Case(shards=2, ep=2), Case(pp=2)),
    (Case(pp=2, shards=2, ep=2), Case(cp=2, replicas=2)),
    (Case(tp=2, shards=2, ep=4), Case(pp=2, schedule="Interleaved1F1B")),
    (Case(), Case(tp=2, cp=2, ep=2)),
    (Case(GQ, pp=2, schedule="ZBVZeroBubble"), Case(GQ)),
    (Case(GQ, pp=2, tp=2), Case(GQ, shards=4)),
    (Case(GQ, tp=4), Case(GQ, pp=2, schedule="DualPipeV")),
]


class Run:
    """What a trainer holds, as far as a checkpoint is concerned."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.engine, self.meshes = build(case)
        self.optimizer = build_optimizer(self.engine.parts, config_of(case).optimizer)
        self.checkpointer = Checkpointer(folder, Checkpoint(), self.engine.parts, self.optimizer)
        self.steps = 0

    def train(self, steps: int) -> list[float]:
        """Losses of so many steps."""
        losses = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            batch = rows_of(batch_of_step(self.steps), self.meshes)
            losses.append(self.engine.forward_backward(batch).loss.item())
            self.engine.clip_grads(self.engine.grad_norm(), MAX_NORM)
            self.optimizer.step()
            self.engine.update_routers()
            self.steps += 1
        return losses

    def forget(self) -> "Run":
        """Leave nothing in weights and buffers that could pass for loaded."""
        for part in self.engine.parts:
            for tensor in (*part.parameters(), *part.buffers()):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                local.detach().fill_(math.nan if local.is_floating_point() else -1)
        return self

    def state(self) -> Values:
        """Weights, moments, selection biases and counts of the whole model, by a name made here."""
        own: Values = {}
        for part in self.engine.parts:
            for name, parameter in part.named_parameters():
                own[name] = whole(parameter)
                for entry, value in self.optimizer.state[parameter].items():
                    own[f"{entry} of {name}"] = whole(value)
            for name, buffer in part.named_buffers():
                if name.endswith(("selection_bias", "previous_counts")):
                    own[name] = whole(buffer)
        of_stages = gather(own, self.meshes.pipeline.get_group())
        return {name: value for stage in of_stages for name, value in stage.items()}


def save_and_go_on(case: Case, folder: Path) -> tuple[Values, list[float]]:
    run = Run(case, folder)
    run.train(2)
    run.checkpointer.save(2, {})
    return run.state(), run.train(2)


def load_and_go_on(case: Case, folder: Path) -> tuple[Values, list[float]]:
    run = Run(case, folder).forget()
    assert run.checkpointer.load() == {"schema_version": 1, "step": 2}
    run.steps = 2
    return run.state(), run.train(2)


@pytest.mark.parametrize(("saved", "loaded"), PAIRS, ids=str)
def test_saved_under_one_loaded_under_another(
    pool: Pool, tmp_path: Path, saved: Case, loaded: Case
) -> None:
    state, losses = pool.run(saved.world, save_and_go_on, saved, tmp_path)[0]
    biases = [value for name, value in state.items() if name.endswith("selection_bias")]
    assert saved.family == GQ or all(bias.count_nonzero() for bias in biases)
    for got, gone_on in pool.run(loaded.world, load_and_go_on, loaded, tmp_path):
        assert_same(got, state)
        assert gone_on == pytest.approx(losses, rel=LOADED_LOSS_RTOL)


def save_behind(case: Case, folder: Path) -> Values:
    """In the background, while gradients are still there and training goes on."""
    run = Run(case, folder)
    run.checkpointer.section = Checkpoint(async_mode="async")
    run.train(2)
    assert all(parameter.grad is not None for parameter in run.engine.parameters())
    run.checkpointer.save(2, {})
    state = run.state()
    run.train(1)
    run.checkpointer.finish()
    return state


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (Case(shards=2, ep=2), Case(tp=2)),
        (Case(GQ, pp=2, schedule="ZBVZeroBubble"), Case(GQ, shards=2)),
    ],
    ids=str,
)
def test_saved_behind_training(pool: Pool, tmp_path: Path, saved: Case, loaded: Case) -> None:
    state = pool.run(saved.world, save_behind, saved, tmp_path)[0]
    for got, _ in pool.run(loaded.world, load_and_go_on, loaded, tmp_path):
        assert_same(got, state)
