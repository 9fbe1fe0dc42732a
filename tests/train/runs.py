"""Small runs for tests: a recipe that extends the debug one, trained in a pool or by itself."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titan_moe.config import load_config
from titan_moe.train import Trainer, train
from titan_moe.world import StopSignal, World

ROOT = Path(__file__).parents[2]

# Not reproducible, by contract: times, memory, and which attempt it was.
TIMES = {
    "attempt",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "tflops_per_device",
    "mfu",
    "data_seconds",
    "step_seconds",
    "memory_peak_gib",
}

SMALL = """
extends = {debug!r}
[job]
name = "run"
dump_folder = {folder!r}
[model]
hidden_size = 32
num_layers = 3
num_heads = 2
kv_lora_rank = 16
qk_nope_head_dim = 8
qk_rope_head_dim = 8
v_head_dim = 8
intermediate_size = 64
moe_intermediate_size = 16
balance_loss_weight = 0.01
z_loss_weight = 0.001
bias_update_rate = 0.01
max_seq_len = 64
[training]
global_batch_size = 8
seq_len = 64
steps = 20
[lr_scheduler]
warmup_steps = 5
total_steps = 40
[data]
num_streams = 8
[[data.sources]]
name = "words"
path = {data!r}
holdout_every = 10
[validation]
freq = 8
[[validation.sets]]
name = "words"
holdout_of = "words"
max_tokens = 1500
[checkpoint]
interval = 4
[metrics]
log_freq = 1
"""


def write_recipe(folder: Path) -> Path:
    """A recipe and its documents in `folder`; runs go to `folder/runs`."""
    data = folder / "words.jsonl"
    words = random.Random(7)
    with data.open("w") as file:
        for _ in range(150):
            length = words.randrange(1, 60)
            text = " ".join(f"w{words.randrange(30)}" for _ in range(length))
            file.write(json.dumps({"text": text}) + "\n")
    debug = str(ROOT / "train_configs" / "debug.toml")
    recipe = folder / "small.toml"
    recipe.write_text(
        SMALL.format(debug=debug, data=str(data), folder=str(folder / "runs")), encoding="utf-8"
    )
    return recipe


def train_here(recipe: Path, *overrides: str) -> None:
    """A case for the pool: train on the processes that are there."""
    torch.manual_seed(dist.get_rank())  # that nothing draws from it is part of the promise
    config = load_config(recipe, overrides, world=dist.get_world_size())
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    train(config, world, StopSignal())


def stop_here(recipe: Path, step: int, *overrides: str) -> None:
    """A case for the pool: as `train_here`, but told to stop while it does `step`."""

    class Stop:
        @property
        def reason(self) -> str | None:
            return "a test" if trainer.step >= step else None

    config = load_config(recipe, overrides, world=dist.get_world_size())
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    trainer = Trainer(config, world, Stop())  # type: ignore[arg-type]
    trainer.run()
    assert trainer.step == step


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a file that may be being written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]


def reproducible(record: dict[str, Any]) -> dict[str, Any]:
    """A record of metrics.jsonl without what a repeated run may change."""
    return {key: value for key, value in record.items() if key not in TIMES}


def start(recipe: Path, *overrides: str, processes: int = 1) -> subprocess.Popen[str]:
    """Launch as a person would: alone, or under torchrun."""
    launcher = ["-m"]
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", "-m"]
        launcher.insert(3, f"--nproc-per-node={processes}")
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, *launcher, "titan_moe.train", str(recipe), *overrides],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Under nohup the tests, and all that they start, would ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )


def family(process: subprocess.Popen[str]) -> list[int]:
    """The process and all below it, which torchrun puts into sessions of their own."""
    members = [process.pid]
    for pid in members:
        members += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return members


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL to the whole family."""
    for pid in family(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def finish(process: subprocess.Popen[str], timeout_seconds: float = 120.0) -> tuple[int, str]:
    """Exit code and output."""
    output, _ = process.communicate(timeout=timeout_seconds)
    return process.returncode, output


def wait_for_step(process: subprocess.Popen[str], metrics: Path, step: int) -> None:
    """Until the run has logged `step`; it must not end before."""
    deadline = time.monotonic() + 120.0
    while not any(record["step"] >= step for record in lines_of(metrics)):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"step {step} was not reached:\n{finish(process)[1]}")
        time.sleep(0.01)


def assert_same(got: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    """Every reproducible value of every record, bit for bit."""
    assert [reproducible(record) for record in got] == [reproducible(r) for r in expected]
