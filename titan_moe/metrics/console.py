"""What a person watches: one aligned line per logged step. No torch."""

import logging
import os
import re
import sys
from typing import Any, TextIO

_BOLD, _DIM, _RED, _CYAN, _RESET = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[36m", "\x1b[0m"
_PAINT = re.compile("\x1b\\[\\d+m")
_UNKNOWN = "-"

logger = logging.getLogger(__name__)


class Console:
    """Prints records as they are written to metrics.jsonl and validation.jsonl."""

    def __init__(self, total_steps: int, color: bool = True, stream: TextIO | None = None) -> None:
        """
        color: where the stream is a terminal and NO_COLOR is not set (https://no-color.org).
        """
        self._stream = sys.stdout if stream is None else stream
        self._color = color and self._stream.isatty() and not os.environ.get("NO_COLOR")
        self._total_steps = total_steps
        self._titled = False

    def step(self, record: dict[str, Any]) -> None:
        """One line; before the first, the titles of its columns."""
        cells = _cells(record, self._total_steps)
        if not self._titled:
            titles = "  ".join(title.rjust(width) for title, width, _, _ in cells)
            self._print(self._painted(titles, _DIM))
            self._titled = True
        self._print("  ".join(self._painted(text.rjust(w), c) for _, w, text, c in cells))

    def validation(self, record: dict[str, Any]) -> None:
        """One line per set, with the byte-bigram baseline beside it."""
        name = self._painted(str(record["name"]), _CYAN)
        loss = self._painted(f"{record['nats_per_byte']:.3f} nats/byte", _BOLD)
        self._print(
            f"{name}: {loss}, {record['bits_per_byte']:.2f} bits/byte; "
            f"byte-bigram entropy {record['bigram_nats_per_byte']:.3f} nats/byte"
        )

    def _painted(self, text: str, color: str) -> str:
        return f"{color}{text}{_RESET}" if self._color and color else text

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)
        logger.debug(_PAINT.sub("", line))  # for the log file; a terminal may be gone tomorrow


def _cells(record: dict[str, Any], total_steps: int) -> list[tuple[str, int, str, str]]:
    """Title, width, text and colour of each column."""
    step, moe = record["step"], record["moe"]
    left = duration((total_steps - step) * record["step_seconds"])
    dead = moe["dead_experts"]
    step_width = 2 * len(str(total_steps)) + 1
    ahead = record["mtp_loss"]  # only of models that predict further ahead
    return [
        ("step", max(step_width, 6), f"{step}/{total_steps}", _CYAN),
        ("done", 4, f"{step / total_steps:.0%}", ""),
        ("left", 7, left, ""),
        ("loss", 8, _number(record["loss"], ".4f"), _BOLD),
        *([] if ahead is None else [("mtp loss", 8, _number(ahead, ".4f"), "")]),
        ("grad norm", 9, _number(record["grad_norm"], ".3f"), ""),
        ("lr", 8, _number(record["lr"], ".2e"), ""),
        ("tokens/s", 10, _number(record["tokens_per_second"], ",.0f"), ""),
        ("TFLOP/s", 8, _number(record["tflops_per_device"], ".4g"), ""),
        ("MFU", 6, _number(record["mfu"], ".1%"), ""),
        ("imbalance", 9, _number(moe["max_violation"], ".2f"), ""),
        ("dead", 4, _number(dead, "d"), _RED if dead else ""),
    ]


def _number(value: float | None, spec: str) -> str:
    return _UNKNOWN if value is None else format(value, spec)


def duration(seconds: float) -> str:
    """Two units at most: `42s`, `4m 51s`, `3h 07m`, `12d 05h`."""
    whole = round(seconds)
    for unit, size, below, smaller in (("d", 86400, "h", 3600), ("h", 3600, "m", 60)):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // smaller:02d}{below}"
    return f"{whole // 60}m {whole % 60:02d}s" if whole >= 60 else f"{whole}s"
