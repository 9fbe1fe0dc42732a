"""The first command of the README, as written: what a newcomer sees after some five minutes."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.train.runs import ROOT, lines_of

# Nats per byte by which the trained model must beat a table of byte pairs made of the very text.
WON = 0.3


@pytest.mark.nightly
def test_it_learns_more_than_byte_pairs(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("CONFIG_FILE", "NGPU")}
    done = subprocess.run(
        [ROOT / "run_train.sh", f"--job.dump_folder={tmp_path}"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    last = lines_of(tmp_path / "debug/validation.jsonl")[-1]
    print(done.stdout)
    assert last["nats_per_byte"] <= last["bigram_nats_per_byte"] - WON, last
    assert f"byte-bigram entropy {last['bigram_nats_per_byte']:.3f}" in done.stdout
    assert lines_of(tmp_path / "debug/metrics.jsonl")[-1]["moe"]["dead_experts"] == 0
