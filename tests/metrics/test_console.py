"""What a person sees, character for character."""

import io
import re
from typing import Any

import pytest

from titan_moe.metrics.console import Console, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def record(step: int, **changes: Any) -> dict[str, Any]:
    moe = {"max_violation": 0.85, "dead_experts": 0, "entropy": 0.98, "bias_range": 0.01}
    return {
        "step": step,
        "loss": 5.43212,
        "mtp_loss": None,
        "grad_norm": 1.23456,
        "lr": 1e-3,
        "tokens_per_second": 3412.3,
        "tflops_per_device": 0.041,
        "mfu": None,
        "step_seconds": 1.0,
        "moe": moe | changes.pop("moe", {}),
    } | changes


def test_columns() -> None:
    stream = io.StringIO()
    console = Console(300, stream=stream)
    console.step(record(9))
    console.step(record(300, loss=None, mfu=0.4217, tflops_per_device=417.3, tokens_per_second=2e6))
    console.step(record(12, moe={"dead_experts": 3, "max_violation": 12.0}))
    console.step(record(13, moe=dict.fromkeys(record(1)["moe"])))
    assert stream.getvalue().splitlines() == [
        "   step  done     left      loss  grad norm        lr    tokens/s   TFLOP/s     MFU"
        "  imbalance  dead",
        "  9/300    3%   4m 51s    5.4321      1.235  1.00e-03       3,412     0.041       -"
        "       0.85     0",
        "300/300  100%       0s         -      1.235  1.00e-03   2,000,000     417.3   42.2%"
        "       0.85     0",
        " 12/300    4%   4m 48s    5.4321      1.235  1.00e-03       3,412     0.041       -"
        "      12.00     3",
        " 13/300    4%   4m 47s    5.4321      1.235  1.00e-03       3,412     0.041       -"
        "          -     -",
    ]


def test_a_column_for_the_loss_of_tokens_further_ahead() -> None:
    stream = io.StringIO()
    Console(300, stream=stream).step(record(9, mtp_loss=6.54321))
    title, line = stream.getvalue().splitlines()
    assert title.startswith("   step  done     left      loss  mtp loss  grad norm")
    assert line.startswith("  9/300    3%   4m 51s    5.4321    6.5432      1.235")


def test_colour_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)

    def written(stream: io.StringIO, color: bool = True) -> str:
        console = Console(300, color=color, stream=stream)
        console.step(record(9))
        console.validation(
            {"name": "a", "nats_per_byte": 1.0, "bits_per_byte": 2.0, "bigram_nats_per_byte": 3.0}
        )
        return stream.getvalue()

    assert "\x1b[" in written(Terminal())
    uncoloured = re.sub(r"\x1b\[[0-9;]*m", "", written(Terminal()))
    assert uncoloured == written(io.StringIO())
    assert "\x1b[" not in written(Terminal(), color=False)
    assert "\x1b[" not in written(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in written(Terminal())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0s"),
        (59.4, "59s"),
        (59.6, "1m 00s"),
        (291, "4m 51s"),
        (3599.7, "1h 00m"),
        (11220, "3h 07m"),
        (86400 * 12 + 3600 * 5, "12d 05h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
