"""Dense peak rates of known accelerators, from `peaks.toml` beside this file. No torch."""

import re
import tomllib
from functools import cache
from importlib.resources import files
from typing import Any, Literal

Precision = Literal["bf16", "fp8", "tf32"]


@cache
def known_devices() -> list[dict[str, Any]]:
    """Entries of `peaks.toml`: name, pattern, rates in TFLOP/s, source; in order of matching."""
    text = (files("titan_moe.metrics") / "peaks.toml").read_text(encoding="utf-8")
    return list(tomllib.loads(text)["device"])


def peak_tflops(device_name: str, precision: Precision = "bf16") -> float | None:
    """Dense peak of a device in TFLOP/s, or None where it is not known.

    device_name: as the driver reports it, e.g. "NVIDIA H100 80GB HBM3". A slice of a device (MIG)
        has no published peak.
    """
    if re.search(r"\bMIG\b", device_name):
        return None
    for device in known_devices():
        if re.search(device["pattern"], device_name):
            return device.get(precision)
    return None
