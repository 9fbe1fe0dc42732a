"""What a laptop asks for without training (plans, listings of a run) does not wait for torch."""

import subprocess
import sys

MODULES = [
    "titan_moe.checkpoint.folder",
    "titan_moe.metrics.console",
    "titan_moe.flops",
    "titan_moe.metrics.jsonl",
    "titan_moe.metrics.logs",
    "titan_moe.metrics.peaks",
    "titan_moe.metrics.run_folder",
]


def test_no_torch() -> None:
    code = f"import sys, {', '.join(MODULES)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
