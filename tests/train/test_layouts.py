"""The whole loop, on any number of processes: the same metrics as one process that keeps it all."""

import math
import shutil
from itertools import count
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.tolerances import PARITY_CURVE_RTOL
from tests.train.runs import lines_of, train_here, write_recipe
from titan_moe.check.pool import Pool
from titan_moe.parallel.engine import Engine, StepOutput

REPLICATE = "--parallelism.data_parallel_replicate_degree"
TP = "--parallelism.tensor_parallel_degree"
EP = "--parallelism.expert_parallel_degree"
CP = "--parallelism.context_parallel_degree"
PP = "--parallelism.pipeline_parallel_degree"
ROWS = "--training.local_batch_size"

LAYOUTS = {
    "fsdp 2": (2, []),
    "fsdp 4": (4, []),
    "hsdp 2 × 2": (4, [f"{REPLICATE}=2"]),
    "replicas 2": (2, [f"{REPLICATE}=2"]),
    "accumulation 4": (1, [f"{ROWS}=2"]),
    "fsdp 2, accumulation 4": (2, [f"{ROWS}=1"]),
    "hsdp 2 × 2, accumulation 2": (4, [f"{ROWS}=1", f"{REPLICATE}=2"]),
    "tp 2": (2, [f"{TP}=2"]),
    "tp 2, sequence parallel off": (2, [f"{TP}=2", "--parallelism.sequence_parallel=false"]),
    "ep 2": (2, [f"{EP}=2"]),
    "cp 2": (2, [f"{CP}=2"]),
    "pp 2": (2, [f"{PP}=2"]),
    "pp 2, fsdp 2, ep 2": (4, [f"{PP}=2", f"{EP}=2"]),
    "recomputed, weights kept": (
        2,
        [
            f"{ROWS}=2",
            "--activation_checkpoint.mode=full",
            "--parallelism.fsdp_reshard_after_forward=never",
        ],
    ),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Path:
    """A recipe whose run on one process is there already."""
    recipe = write_recipe(tmp_path_factory.mktemp("layouts"))
    pool.run(1, train_here, recipe, "--job.name=alone")
    return recipe


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_equal_those_of_one_process(recipe: Path, pool: Pool, layout: str) -> None:
    world, overrides = LAYOUTS[layout]
    runs = recipe.parent / "runs"
    pool.run(world, train_here, recipe, "--job.name=laid-out", *overrides)
    assert_equal(runs / "laid-out", runs / "alone")
    shutil.rmtree(runs / "laid-out")


@pytest.mark.parametrize(
    ("first", "then"),
    [("ep 2", "pp 2"), ("pp 2, fsdp 2, ep 2", "tp 2"), ("cp 2", "hsdp 2 × 2")],
)
def test_a_run_goes_on_under_another_layout(
    recipe: Path, pool: Pool, first: str, then: str
) -> None:
    """Not a token is lost or read again: the metrics are those of one unbroken process."""
    runs = recipe.parent / "runs"
    for layout, stop in ((first, "--training.steps=7"), (then, "--training.steps=20")):
        world, overrides = LAYOUTS[layout]
        pool.run(world, train_here, recipe, "--job.name=laid-anew", stop, *overrides)
    laid_anew = lines_of(runs / "laid-anew/metrics.jsonl")
    assert [record["attempt"] for record in laid_anew] == [1] * 7 + [2] * 13
    assert_equal(runs / "laid-anew", runs / "alone", besides_step=7)
    shutil.rmtree(runs / "laid-anew")


def test_multi_token_prediction_under_another_layout(recipe: Path, pool: Pool) -> None:
    """Its loss is logged on its own; it goes on where the last stage has the embedding as well."""
    runs, ahead = recipe.parent / "runs", "--model.num_mtp_layers=2"
    pool.run(1, train_here, recipe, "--job.name=ahead", ahead)
    for layout, stop in (("fsdp 2", 7), ("pp 2, fsdp 2, ep 2", 12), ("tp 2", 20)):
        world, overrides = LAYOUTS[layout]
        steps = f"--training.steps={stop}"
        pool.run(world, train_here, recipe, "--job.name=ahead-anew", ahead, steps, *overrides)
    got, wanted = (lines_of(runs / name / "metrics.jsonl") for name in ("ahead-anew", "ahead"))
    assert [record["attempt"] for record in got] == [1] * 7 + [2] * 5 + [3] * 8
    for key in ("loss", "balance_loss", "mtp_loss", "grad_norm"):
        values = [record[key] for record in wanted]
        assert [record[key] for record in got] == pytest.approx(values, rel=PARITY_CURVE_RTOL)
    assert [record["moe"] for record in got] == [record["moe"] for record in wanted]
    assert wanted[-1]["mtp_loss"] < wanted[0]["mtp_loss"]
    assert all(record["mtp_loss"] is None for record in lines_of(runs / "alone/metrics.jsonl"))
    for name in ("ahead", "ahead-anew"):
        shutil.rmtree(runs / name)


def assert_equal(got: Path, expected: Path, besides_step: int | None = None) -> None:
    """Two runs' metrics. besides_step: a step after which only the first validated, as its last."""
    laid_out, alone = lines_of(got / "metrics.jsonl"), lines_of(expected / "metrics.jsonl")
    assert [record["step"] for record in laid_out] == list(range(1, 21))
    for record, wanted in zip(laid_out, alone, strict=True):
        for key in ("loss", "balance_loss", "grad_norm"):
            close = pytest.approx(wanted[key], rel=PARITY_CURVE_RTOL)
            assert record[key] == close, (key, record["step"])
        for key in ("lr", "tokens_seen", "moe"):
            assert record[key] == wanted[key], (key, record["step"])
    validated = [r for r in lines_of(got / "validation.jsonl") if r["step"] != besides_step]
    for record, wanted in zip(validated, lines_of(expected / "validation.jsonl"), strict=True):
        assert record == wanted | {
            key: pytest.approx(wanted[key], rel=PARITY_CURVE_RTOL)
            for key in ("nats_per_token", "nats_per_byte", "bits_per_byte")
        }


def train_with_nan(recipe: Path, at: int, *overrides: str) -> str:
    """A gradient turns NaN on one rank alone, in the second step; what every rank says of it."""
    forward_backward = Engine.forward_backward
    steps = count(1)

    def poisoned(self: Engine, batch: dict[str, Tensor]) -> StepOutput:
        output = forward_backward(self, batch)
        if next(steps) == 2 and dist.get_rank() == at:
            parameter = next(iter(self.parameters()))
            parameter.grad.to_local().fill_(math.nan)
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "forward_backward", poisoned)
        with pytest.raises(FloatingPointError) as raised:
            train_here(recipe, *overrides)
    return str(raised.value)


@pytest.mark.parametrize(
    ("layout", "at"), [("tp 2", 1), ("pp 2", 0), ("pp 2, fsdp 2, ep 2", 3), ("cp 2", 1)]
)
def test_one_rank_that_is_not_finite_stops_all(
    recipe: Path, pool: Pool, layout: str, at: int
) -> None:
    world, overrides = LAYOUTS[layout]
    said = pool.run(world, train_with_nan, recipe, at, "--job.name=poisoned", *overrides)
    assert len(set(said)) == 1
    assert said[0].startswith("step 2: the gradient's norm is nan, the loss ")
    assert len(lines_of(recipe.parent / "runs/poisoned/metrics.jsonl")) == 1
    shutil.rmtree(recipe.parent / "runs/poisoned")
