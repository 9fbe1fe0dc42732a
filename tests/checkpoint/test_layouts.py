"""Saved on one layout, loaded on any: the same bits, and the same next step."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoint.stand_in import Run, assert_same
from titan_moe.check.pool import Pool

Values = dict[str, Tensor]

# A run without a process group is a case here.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save_and_go_on(folder: Path, mesh_shape: tuple[int, ...], mode: str) -> tuple[Values, Values]:
    run = Run(folder, mesh_shape, async_mode=mode).train(2).save()
    at_save = run.values()
    after = run.train().values()
    run.checkpointer.finish()
    return at_save, after


def load_and_go_on(folder: Path, mesh_shape: tuple[int, ...]) -> tuple[Values, Values]:
    run = Run(folder, mesh_shape, seed=1)
    assert run.load() == {"schema_version": 1, "step": 2, "tokens_seen": 200}
    return run.values(), run.train().values()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_two_ranks_to_any(pool: Pool, tmp_path: Path, mode: str) -> None:
    at_save, after = pool.run(2, save_and_go_on, tmp_path, (2,), mode)[0]
    assert at_save["layers.0.router.selection_bias"].count_nonzero() == 3
    assert at_save["step of embedding.weight"] == 2
    for world, mesh_shape in [(1, (1,)), (2, (2,)), (4, (4,)), (4, (2, 2))]:
        for loaded, gone_on in pool.run(world, load_and_go_on, tmp_path, mesh_shape):
            assert_same(loaded, at_save)
            assert_same(gone_on, after)
    loaded, gone_on = load_and_go_on(tmp_path, ())  # no process group at all
    assert_same(loaded, at_save)
    assert_same(gone_on, after)


def test_replicas_to_one_rank(pool: Pool, tmp_path: Path) -> None:
    at_save, after = pool.run(4, save_and_go_on, tmp_path, (2, 2), "disabled")[0]
    loaded, gone_on = load_and_go_on(tmp_path, ())
    assert_same(loaded, at_save)
    assert_same(gone_on, after)


def save_then_change(folder: Path, mesh_shape: tuple[int, ...]) -> Values:
    run = Run(folder, mesh_shape, async_mode="async").train(2)
    at_save = run.values()
    run.save()
    with torch.no_grad():
        for tensor in (*run.model.parameters(), *run.model.buffers()):
            tensor.zero_()
    run.train(3)
    run.checkpointer.finish()
    return at_save


def test_background_writing_overlaps_training_on_two_ranks(pool: Pool, tmp_path: Path) -> None:
    at_save = pool.run(2, save_then_change, tmp_path, (2,))[0]
    assert_same(load_and_go_on(tmp_path, ())[0], at_save)
