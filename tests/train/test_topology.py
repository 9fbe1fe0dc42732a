"""What a run says of its layout, and of the network that it is told about."""

from pathlib import Path

import pytest

from tests.train.runs import train_here, write_recipe
from titan_moe.check.pool import Pool

SHORT = ("--training.steps=1", "--validation.enable=false", "--checkpoint.enable=false")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["--parallelism.scale_up_size=1"],
            ["topology: domains of 1 rank; inside: none; across: dp_shard, efsdp"],
        ),
        (
            ["--parallelism.scale_up_size=2"],
            ["topology: domains of 2 ranks; inside: dp_shard, efsdp; across: none"],
        ),
        ([], []),
    ],
)
def test_the_log_tells_what_crosses_domains(
    tmp_path: Path, pool: Pool, overrides: list[str], told: list[str]
) -> None:
    pool.run(2, train_here, write_recipe(tmp_path), *SHORT, *overrides)
    log = (tmp_path / "runs/run/logs/rank0.log").read_text(encoding="utf-8")
    said = [line.split(": ", maxsplit=1)[1] for line in log.splitlines()]
    layout = "layout: pp 1 × dp_replicate 1 × dp_shard 2 × cp 1 × tp 1; experts: efsdp 2 × ep 1"
    at = said.index(layout)
    assert said[at + 1 : at + 1 + len(told)] == told
    assert sum(line.startswith(("layout: ", "topology: ")) for line in said) == 1 + len(told)
