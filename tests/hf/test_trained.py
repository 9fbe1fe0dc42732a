"""What a debug run of each family learned over experts and shards, in transformers and back.

B rows, S sequence.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.hf.test_transformers import ROOT, logits
from tests.tolerances import FP32_LOGITS, LOADED_LOSS_RTOL
from tests.train.runs import lines_of, train_here
from titan_moe.check.pool import Pool
from titan_moe.generate import open_checkpoint, open_hf_folder

FAMILIES = sorted(path.parent.name for path in ROOT.glob("train_configs/*/debug.toml"))
SHORT = [
    "--training.global_batch_size=8",
    "--training.seq_len=64",
    "--lr_scheduler.warmup_steps=0",
    "--lr_scheduler.total_steps=20",
    "--validation.enable=false",
    "--metrics.log_freq=1",
]


def losses(folder: Path, name: str) -> list[float]:
    return [line["loss"] for line in lines_of(folder / name / "metrics.jsonl")]


@pytest.mark.parametrize(
    "family",
    [  # one by day: all formats and layouts are in the other tests of this folder
        family if family == "gpt_oss" else pytest.param(family, marks=pytest.mark.nightly)
        for family in FAMILIES
    ],
)
def test_same_logits_there_and_same_loss_back(pool: Pool, tmp_path: Path, family: str) -> None:
    config = ROOT / "train_configs" / family / "debug.toml"
    common = [*SHORT, f"--job.dump_folder={tmp_path}"]
    leaving = [
        "--job.name=first",
        "--training.steps=4",
        "--parallelism.expert_parallel_degree=2",
        "--checkpoint.last_save_in_hf=true",
        "--checkpoint.export_dtype=float32",
    ]
    pool.run(4, train_here, config, *common, *leaving)
    first = losses(tmp_path, "first")
    assert first[3] < first[0], "nothing was learned, so that nothing would be compared"
    step, folder = tmp_path / "first/checkpoint/step-4", tmp_path / "first/hf/step-4"

    ours, back = open_checkpoint(step), open_hf_folder(folder, f"recipes.{family}")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens_BS: Tensor = torch.arange(96).view(2, 48) * 5 % 256
    with torch.no_grad():
        expected = logits(ours.model, tokens_BS)
        assert (theirs(tokens_BS).logits - expected).abs().max() < FP32_LOGITS
        assert torch.equal(logits(back.model, tokens_BS), expected)

    starting = ["--training.steps=1", "--parallelism.tensor_parallel_degree=2"]
    for name, path in (("ours", step), ("theirs", folder)):
        source = [f"--job.name={name}", f"--checkpoint.initial_load_path={path}"]
        in_hf = f"--checkpoint.initial_load_in_hf={str(path == folder).lower()}"
        pool.run(2, train_here, config, *common, *starting, *source, in_hf)
    [from_ours], [from_theirs] = losses(tmp_path, "ours"), losses(tmp_path, "theirs")
    assert from_theirs == pytest.approx(from_ours, rel=LOADED_LOSS_RTOL)
    assert from_theirs < first[0]
