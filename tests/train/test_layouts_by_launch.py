"""The debug recipe launched as a person would, on four processes, against one process: nightly.

A choice of experts that is nearly a tie may fall otherwise under another layout (a flip), and what
follows from it is no rounding any more: a count that crosses the mean moves a selection bias the
other way, and with it hundreds of tokens. Flips are counted by the tokens per expert of every step,
which checkpoints hold, and printed. The recipe's own learning rate, made for a run of minutes,
turns rounding into flips from step 10 on; a tenth of it, and a quarter of the tokens, does not.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint

from tests.tolerances import PARITY_CURVE_RTOL
from tests.train.runs import ROOT, lines_of, train_here, write_recipe
from titan_moe.check.pool import Pool

pytestmark = pytest.mark.nightly

STEPS = 20
GENTLE = ["--optimizer.lr=4e-4", "--training.seq_len=64"]
TP = "--parallelism.tensor_parallel_degree"
EP = "--parallelism.expert_parallel_degree"
CP = "--parallelism.context_parallel_degree"
PP = "--parallelism.pipeline_parallel_degree"
REPLICATE = "--parallelism.data_parallel_replicate_degree"
SCHEDULE = "--parallelism.pipeline_parallel_schedule"
TWO_TIER = ["--parallelism.expert_parallel_comm_backend=two_tier", "--parallelism.scale_up_size=2"]

LAYOUTS = {
    "fsdp 2, tp 2, ep 4": [f"{TP}=2", f"{EP}=4"],
    "fsdp 2, cp 2, ep 2": [f"{CP}=2", f"{EP}=2"],
    "fsdp 4, ep 4, two-tier": [f"{EP}=4", *TWO_TIER],
    "hsdp 2 × 2, ep 2, recomputed": [
        f"{REPLICATE}=2",
        f"{EP}=2",
        "--activation_checkpoint.mode=full",
    ],
    "pp 2 (ZBVZeroBubble), fsdp 2, ep 2": [f"{PP}=2", f"{EP}=2", f"{SCHEDULE}=ZBVZeroBubble"],
    "pp 2 (Interleaved1F1B), tp 2": [f"{PP}=2", f"{TP}=2", f"{SCHEDULE}=Interleaved1F1B"],
}


def launch(folder: Path, name: str, processes: int, overrides: list[str]) -> Path:
    """The run folder, with a checkpoint of every step."""
    done = subprocess.run(
        [
            ROOT / "run_train.sh",
            f"--job.dump_folder={folder}",
            f"--job.name={name}",
            f"--training.steps={STEPS}",
            "--metrics.log_freq=1",
            "--validation.enable=false",
            "--checkpoint.interval=1",
            "--checkpoint.keep_latest_k=0",
            *GENTLE,
            *overrides,
        ],
        env={k: v for k, v in os.environ.items() if k != "CONFIG_FILE"} | {"NGPU": str(processes)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return folder / name


def counts_of(run: Path, step: int) -> Tensor:
    """Tokens per MoE layer and expert, int64 [L, E], of that step."""
    folder = run / "checkpoint" / f"step-{step}"
    saved = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    counts = {
        key: torch.zeros(entry.size, dtype=torch.int64)
        for key, entry in saved.items()
        if key.endswith("moe.previous_counts")
    }
    assert counts
    checkpoint.load(counts, checkpoint_id=folder, no_dist=True)
    return torch.stack([counts[key] for key in sorted(counts)])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(tmp_path_factory.mktemp("launched"), "alone", 1, [])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_steps_equal_one_process(alone: Path, layout: str) -> None:
    run = launch(alone.parent, "laid-out", 4, LAYOUTS[layout])
    flips = [
        int((counts_of(run, step) - counts_of(alone, step)).abs().sum()) // 2
        for step in range(1, STEPS + 1)
    ]
    tokens = int(counts_of(alone, 1).sum())
    got, expected = lines_of(run / "metrics.jsonl"), lines_of(alone / "metrics.jsonl")
    shutil.rmtree(run)
    assert len(got) == len(expected) == STEPS
    worst = {
        key: max(abs(g[key] / e[key] - 1) for g, e in zip(got, expected, strict=True))
        for key in ("loss", "grad_norm")
    }
    print(
        f"{layout}: {sum(flips)} flips among {STEPS} × {tokens:,} choices, by step {flips}; "
        f"loss within {worst['loss']:.1e}, norm within {worst['grad_norm']:.1e}"
    )
    assert worst["loss"] <= PARITY_CURVE_RTOL, worst
    assert worst["grad_norm"] <= PARITY_CURVE_RTOL, worst


BF16 = "--training.mixed_precision_param=bfloat16"
IN_BF16 = {
    "alone": (1, []),
    "accumulation 4": (1, ["--training.local_batch_size=2"]),
    "fsdp 4": (4, []),
    "tp 2": (2, [f"{TP}=2"]),
    "fsdp 2, tp 2, ep 4": (4, [f"{TP}=2", f"{EP}=4"]),
    "fsdp 4, ep 4, two-tier": (4, [f"{EP}=4", *TWO_TIER]),
    "cp 2": (2, [f"{CP}=2"]),
    "pp 2, fsdp 2, ep 2": (4, [f"{PP}=2", f"{EP}=2"]),
}


def test_bf16_layouts_spread_less_than_seeds(tmp_path: Path, pool: Pool) -> None:
    """In bf16 no two layouts agree to many digits; they must not differ more than luck does."""
    recipe = write_recipe(tmp_path)

    def final_loss(name: str, world: int, *overrides: str) -> float:
        pool.run(world, train_here, recipe, f"--job.name={name}", BF16, *overrides)
        last = lines_of(tmp_path / "runs" / name / "metrics.jsonl")[-1]
        assert last["step"] == STEPS
        return float(last["loss"])

    seeds = [final_loss(f"seed-{seed}", 1, f"--debug.seed={seed}") for seed in range(3)]
    layouts = [
        final_loss(f"layout-{index}", world, *overrides)
        for index, (world, overrides) in enumerate(IN_BF16.values())
    ]
    spread_of_seeds, spread = max(seeds) - min(seeds), max(layouts) - min(layouts)
    print(f"final losses spread by {spread:.2e} over layouts, {spread_of_seeds:.2e} over seeds")
    assert 0.0 < spread <= spread_of_seeds, (layouts, seeds)
