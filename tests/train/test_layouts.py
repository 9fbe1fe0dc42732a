"""The whole loop, on any number of processes: the same metrics as one process that keeps it all."""

import shutil
from pathlib import Path

import pytest

from tests.pool import Pool
from tests.tolerances import PARITY_CURVE_RTOL
from tests.train.runs import lines_of, train_here, write_recipe

REPLICATE = "--parallelism.data_parallel_replicate_degree"
ROWS = "--training.local_batch_size"

LAYOUTS = {
    "fsdp 2": (2, []),
    "fsdp 4": (4, []),
    "hsdp 2 × 2": (4, [f"{REPLICATE}=2"]),
    "replicas 2": (2, [f"{REPLICATE}=2"]),
    "accumulation 4": (1, [f"{ROWS}=2"]),
    "fsdp 2, accumulation 4": (2, [f"{ROWS}=1"]),
    "hsdp 2 × 2, accumulation 2": (4, [f"{ROWS}=1", f"{REPLICATE}=2"]),
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
    alone, laid_out = (
        lines_of(runs / "alone/metrics.jsonl"),
        lines_of(runs / "laid-out/metrics.jsonl"),
    )
    assert [record["step"] for record in laid_out] == list(range(1, 21))
    for got, expected in zip(laid_out, alone, strict=True):
        for key in ("loss", "balance_loss", "grad_norm"):
            assert got[key] == pytest.approx(expected[key], rel=PARITY_CURVE_RTOL), (
                key,
                got["step"],
            )
        for key in ("lr", "tokens_seen", "moe"):
            assert got[key] == expected[key], (key, got["step"])
    for got, expected in zip(
        lines_of(runs / "laid-out/validation.jsonl"),
        lines_of(runs / "alone/validation.jsonl"),
        strict=True,
    ):
        assert got == expected | {
            key: pytest.approx(expected[key], rel=PARITY_CURVE_RTOL)
            for key in ("nats_per_token", "nats_per_byte", "bits_per_byte")
        }
    shutil.rmtree(runs / "laid-out")
