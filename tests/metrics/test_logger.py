"""What a run leaves behind: exact keys, exact numbers, and the same again after a resume."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.metrics.configs import Place, run_config
from titan_moe.metrics.logger import MetricsLogger
from titan_moe.metrics.run_folder import RunFolder

KEYS = [
    "step",
    "attempt",
    "loss",
    "balance_loss",
    "mtp_loss",
    "grad_norm",
    "lr",
    "tokens_seen",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "tflops_per_device",
    "mfu",
    "mfu_peak_tflops",
    "data_seconds",
    "step_seconds",
    "memory_peak_gib",
    "moe",
    "dispatch_bytes",
]
TIMES_AND_MEMORY = {
    "attempt",
    "tokens_per_second",
    "tokens_per_second_per_device",
    "tflops_per_device",
    "mfu",
    "data_seconds",
    "step_seconds",
    "memory_peak_gib",
}
COUNTS_LE = torch.tensor([[3, 1, 0, 4], [2, 2, 2, 2]])
FLOPS_PER_TOKEN = 5e6


def start(parent: Path, step: int = 0, rank: int = 0, **metrics: Any) -> MetricsLogger:
    config = run_config(metrics={"log_freq": 5} | metrics)
    folder = RunFolder(parent, "tiny")
    if rank == 0:
        folder.prepare(config)
        folder.record(config)
        folder.release()
    place = Place(rank=rank)
    return MetricsLogger(folder, config, place, flops_per_token=FLOPS_PER_TOKEN, step=step)


def train(metrics: MetricsLogger, first: int, last: int) -> None:
    for step in range(first, last + 1):
        with metrics.waiting_for_data():
            pass
        metrics.end_step()
        if metrics.is_logged(step):
            metrics.log_step(
                step,
                loss=torch.tensor(2.0) / (step + 2),
                balance_loss=torch.tensor(0.1) * step,
                grad_norm=torch.tensor(1.0) / 3,
                lr=0.1 / step,
                tokens_seen=32 * step,
                counts_LE=COUNTS_LE,
                biases_LE=torch.tensor([[0.5, 0.0, -0.25, 0.0], [0.0] * 4]),
            )


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def reproducible(path: Path) -> list[str]:
    kept = [
        {k: v for k, v in record.items() if k not in TIMES_AND_MEMORY} for record in records(path)
    ]
    return [json.dumps(record) for record in kept]


def test_keys_and_steps(tmp_path: Path) -> None:
    train(start(tmp_path), 1, 20)
    steps = records(tmp_path / "tiny" / "metrics.jsonl")
    assert [record["step"] for record in steps] == [1, 5, 10, 15, 20]
    for record in steps:
        assert list(record) == KEYS
        assert list(record["moe"]) == ["max_violation", "dead_experts", "entropy", "bias_range"]


def test_numbers(tmp_path: Path) -> None:
    train(start(tmp_path, peak_tflops=4.0), 1, 1)
    (record,) = records(tmp_path / "tiny" / "metrics.jsonl")
    assert record["loss"] == float(torch.tensor(2.0) / 3)
    assert record["lr"] == 0.1
    assert record["tokens_seen"] == 32
    assert record["mtp_loss"] is None
    assert record["moe"] == {
        "max_violation": 1.0,
        "dead_experts": 1,
        "entropy": pytest.approx((0.375 * 1.4150375 + 0.375 + 0.5 + 2.0) / 4, abs=1e-7),
        "bias_range": 0.75,
    }
    tokens_per_second = 4 * 8 / record["step_seconds"]
    assert record["tokens_per_second"] == pytest.approx(tokens_per_second)
    assert record["tokens_per_second_per_device"] == pytest.approx(tokens_per_second / 2)
    assert record["tflops_per_device"] == pytest.approx(tokens_per_second / 2 * 5e6 / 1e12)
    assert record["mfu_peak_tflops"] == 4.0
    assert record["mfu"] == pytest.approx(record["tflops_per_device"] / 4.0)
    assert 0 < record["data_seconds"] < record["step_seconds"]


def test_bytes_of_dispatch(tmp_path: Path) -> None:
    metrics = start(tmp_path, enable_tensorboard=True)
    metrics.end_step()
    metrics.log_step(
        1,
        loss=2.0,
        balance_loss=0.0,
        grad_norm=1.0,
        lr=0.1,
        tokens_seen=32,
        counts_LE=COUNTS_LE,
        biases_LE=None,
        dispatch_bytes={"total": 3 << 40, "inside": 3 << 40, "across": None},
    )
    train(metrics, 2, 5)
    metrics.close()
    with_bytes, without = records(tmp_path / "tiny" / "metrics.jsonl")
    assert with_bytes["dispatch_bytes"] == {
        "total": 3 << 40,
        "inside": 3 << 40,
        "across": None,
    }
    assert without["dispatch_bytes"] is None
    curves = EventAccumulator(str(tmp_path / "tiny" / "tb")).Reload()
    assert curves.Scalars("dispatch_bytes/inside")[0].value == 3 << 40


def test_unknown_peak_is_null(tmp_path: Path) -> None:
    train(start(tmp_path), 1, 1)
    (record,) = records(tmp_path / "tiny" / "metrics.jsonl")
    assert record["mfu"] is None
    assert record["mfu_peak_tflops"] is None


def test_a_resumed_run_equals_the_unbroken_one(tmp_path: Path) -> None:
    train(start(tmp_path / "unbroken"), 1, 20)
    train(start(tmp_path / "broken"), 1, 17)  # killed; its last checkpoint was at step 8
    train(start(tmp_path / "broken", step=8), 9, 20)
    unbroken = tmp_path / "unbroken" / "tiny" / "metrics.jsonl"
    broken = tmp_path / "broken" / "tiny" / "metrics.jsonl"
    assert reproducible(broken) == reproducible(unbroken)
    assert [record["attempt"] for record in records(broken)] == [1, 1, 2, 2, 2]


def test_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = start(tmp_path)
    for step in (5, 10):
        metrics.log_validation(
            step,
            "stdlib",
            nats_sum=torch.tensor(1842.0, dtype=torch.float64),
            tokens=500,
            num_bytes=1000,
            bigram_nats_per_byte=2.4312,
        )
    assert capsys.readouterr().out.splitlines()[-1] == (
        "stdlib: 1.842 nats/byte, 2.66 bits/byte; byte-bigram entropy 2.431 nats/byte"
    )
    start(tmp_path, step=5)
    (record,) = records(tmp_path / "tiny" / "validation.jsonl")
    assert record == {
        "step": 5,
        "name": "stdlib",
        "nats_per_token": 3.684,
        "nats_per_byte": 1.842,
        "bits_per_byte": pytest.approx(2.657444, abs=1e-6),
        "bigram_nats_per_byte": 2.4312,
        "tokens": 500,
        "bytes": 1000,
    }


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = start(tmp_path, rank=1, enable_tensorboard=True)
    train(metrics, 1, 5)
    metrics.log_validation(5, "a", nats_sum=1.0, tokens=1, num_bytes=1, bigram_nats_per_byte=1.0)
    metrics.close()
    assert list(tmp_path.rglob("*")) == []
    assert capsys.readouterr().out == ""


def test_curves_are_wound_back(tmp_path: Path) -> None:
    metrics = start(tmp_path, enable_tensorboard=True)
    train(metrics, 1, 15)
    metrics.close()
    metrics = start(tmp_path, step=8, enable_tensorboard=True)
    train(metrics, 9, 10)
    metrics.log_validation(10, "a", nats_sum=6.0, tokens=2, num_bytes=3, bigram_nats_per_byte=1.0)
    metrics.close()
    curves = EventAccumulator(str(tmp_path / "tiny" / "tb"))
    curves.Reload()
    assert [event.step for event in curves.Scalars("loss")] == [1, 5, 10]
    assert [event.value for event in curves.Scalars("moe/dead_experts")] == [1.0, 1.0, 1.0]
    assert [event.value for event in curves.Scalars("validation/a/nats_per_byte")] == [2.0]
    assert "mtp_loss" not in curves.Tags()["scalars"]
