"""What a run says of the network that it is told about."""

from pathlib import Path

import pytest

from tests.pool import Pool
from tests.train.runs import train_here, write_recipe

SHORT = ("--training.steps=1", "--validation.enable=false", "--checkpoint.enable=false")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["--parallelism.scale_up_size=1"],
            ["domains of 1 ranks; inside: none; across: dp_shard, efsdp"],
        ),
        (
            ["--parallelism.scale_up_size=2"],
            ["domains of 2 ranks; inside: dp_shard, efsdp; across: none"],
        ),
        ([], []),
    ],
)
def test_the_log_tells_what_crosses_domains(
    tmp_path: Path, pool: Pool, overrides: list[str], told: list[str]
) -> None:
    pool.run(2, train_here, write_recipe(tmp_path), *SHORT, *overrides)
    log = (tmp_path / "runs/run/logs/rank0.log").read_text(encoding="utf-8")
    _, *lines = log.split("topology: ")
    assert [line.splitlines()[0] for line in lines] == told
