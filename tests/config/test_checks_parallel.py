"""Layouts that can be are not refused; and arithmetic that depends on several tables."""

from collections.abc import Iterator
from itertools import product
from math import prod
from pathlib import Path

import pytest

from tests.config.conftest import Message
from tests.config.refused_layouts import CP, DOMAIN, EP, REPLICATE, SHARD, TP, TWO_TIER
from tests.config.refused_pipelines import KEY, PP
from tests.config.test_checks import files
from tests.config.test_layout import section
from titan_moe.config import load_config
from titan_moe.config.checks import run_checks
from titan_moe.config.schedules import SCHEDULES

ROOT = Path(__file__).parents[2]
PLAIN = "--training.document_mask=false"
WHOLE_SEQUENCES = "--parallelism.sequence_parallel=false"


def powers_of_two(largest_world: int) -> Iterator[tuple[int, ...]]:
    """Degrees of pp, dp_replicate, dp_shard, cp, tp, ep."""
    degrees = (1, 2, 4, 8)
    for dense in product(degrees, repeat=5):
        if prod(dense) <= largest_world:
            yield from ((*dense, ep) for ep in degrees if prod(dense[2:]) % ep == 0)


def test_the_default_takes_any_layout_of_up_to_eight_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config("train_configs/debug.toml")
    layouts = [(degrees, name) for degrees in powers_of_two(8) for name in SCHEDULES]
    allowed = 0
    for degrees, name in layouts:
        pp, world = degrees[0], prod(degrees[:5])
        if pp * SCHEDULES[name].stages_per_rank > config.model.num_layers or pp == 1:
            name = "1F1B"
        keys = {"pipeline_parallel_schedule": name}
        laid_out = config.model_copy(
            update={"parallelism": section(*degrees).model_copy(update=keys)}
        )
        assert not run_checks(laid_out, world, on_disk=False), (degrees, name)
        assert not run_checks(laid_out, None, on_disk=False), (degrees, name)
        allowed += 1
    assert allowed == len(layouts) > 7 * 56  # 1, 5, 15 and 35 ways to make 1, 2, 4 and 8


@pytest.mark.parametrize(
    ("overrides", "world"),
    [
        ([f"{TP}2"], 2),
        ([f"{TP}2", WHOLE_SEQUENCES], 4),
        ([f"{TP}2", "--model.intermediate_size=33"], 2),  # no layer is dense
        ([f"{TP}2", "--training.seq_len=63", WHOLE_SEQUENCES, "--model.num_dense_layers=2"], 2),
        ([f"{TP}2", f"{SHARD}2", f"{EP}4"], 4),
        ([f"{EP}2", f"{REPLICATE}2"], 4),
        ([f"{CP}2", f"{EP}2"], 2),
        ([f"{CP}2", "--training.seq_len=60"], 2),
        (
            [
                f"{CP}2",
                "--training.seq_len=62",
                "--parallelism.context_parallel_load_balancer=none",
            ],
            2,
        ),
        ([f"{CP}2", PLAIN, "--training.attention_backend=flex"], 2),
        ([f"{TP}2", PLAIN, "--training.attention_backend=sdpa"], 2),
        ([f"{TP}2", "--data.num_streams=1", "--training.global_batch_size=2"], 2),
        ([f"{TP}2", f"{DOMAIN}2"], 8),
        ([f"{TP}2", f"{DOMAIN}3"], 2),
        ([f"{DOMAIN}3"], 4),  # a last domain that is not full
        ([f"{EP}4", f"{DOMAIN}8"], 4),
        ([f"{TP}2", f"{DOMAIN}1", "--parallelism.tensor_parallel_across_domains=true"], 2),
        ([f"{EP}4", f"{DOMAIN}2", TWO_TIER], 4),
        ([f"{EP}4", f"{DOMAIN}1", TWO_TIER], 4),
        ([f"{EP}2", "--model.num_dense_layers=1"], 2),
        (["--model.num_dense_layers=2"], 2),
        ([f"{PP}2"], 2),
        ([f"{PP}2", f"{SHARD}2", f"{EP}2"], 4),
        ([f"{PP}2", f"{KEY}layers=[1, 1]"], 2),
        ([f"{PP}2", "--model.num_layers=4", f"{KEY}schedule=LoopedBFS"], 2),
        ([f"{PP}2", f"{KEY}schedule=LoopedBFS", f"{KEY}stages_per_rank=1"], 2),
        ([f"{PP}2", "--model.num_layers=4", f"{KEY}schedule=ZBVZeroBubble"], 2),
        ([f"{PP}2", f"{KEY}schedule=GPipe", f"{KEY}microbatch_size=2"], 2),
        ([f"{PP}2", f"{KEY}schedule_csv=order.csv"], 2),
        ([f"{PP}2", f"{KEY}first_stage_less_layers=0"], 2),
        ([f"{PP}2", f"{KEY}last_stage_less_layers=2"], 2),
    ],
)
def test_accepted(start: Path, overrides: list[str], world: int) -> None:
    files(start)
    load_config("tiny.toml", overrides, world, on_disk=True)
    load_config("tiny.toml", overrides)


def test_rows_of_a_step_are_those_of_a_rank(message: Message) -> None:
    whole = "local_batch_size = 2\n"
    assert message(whole, "", f"{PP}2", f"{KEY}microbatch_size=3", world=4).startswith(
        "command line: parallelism.pipeline_parallel_microbatch_size = 3: does not divide "
        "training.global_batch_size 8 / 2 data-parallel ranks = 4 ("
    )
    deep = ("--model.num_layers=8", f"{PP}8")
    assert message(whole, "", *deep, world=16).startswith(
        "tiny.toml: training.global_batch_size = 8: 8 / 2 data-parallel ranks = 4 "
        "in micro-batches of 1: "
        "1F1B needs a micro-batch per stage, but has 4 for 8 stages ("
    )
    load_config("tiny.toml", deep, world=8)
    rounds = (
        "--model.num_layers=6",
        "--training.global_batch_size=16",
        f"{PP}3",
        f"{KEY}schedule=Interleaved1F1B",
    )
    assert "goes in 16 // 3 ranks = 5 rounds" in message(whole, "", *rounds, world=3)
    load_config("tiny.toml", rounds, world=6)  # 8 rows go in 2
    load_config("tiny.toml", rounds)  # nobody knows yet how many rows a rank has


def test_a_misfit_is_told_once(message: Message) -> None:
    told = message(
        "local_batch_size = 2\n", "", "--training.global_batch_size=6", f"{PP}2", world=8
    )
    assert "6: not a multiple of 4 data-parallel ranks (" in told
    told += message("", "", f"{CP}2", "--training.attention_backend=sdpa")
    assert "cannot go with training.document_mask = true" in told
    told += message("", "", f"{EP}3", f"{REPLICATE}3", "--model.num_experts=9", world=4)
    assert "dp_replicate 3 × cp 1 × tp 1 = 3 does not divide the world" in told
    told += message("", "", f"{PP}2", f"{KEY}schedule=ZBVZeroBubble", f"{KEY}stages_per_rank=3")
    assert "ZBVZeroBubble has exactly 2" in told
    assert "\n" not in told


def test_an_order_is_read_only_where_the_run_starts(start: Path) -> None:
    load_config("tiny.toml", [f"{PP}2", f"{KEY}schedule_csv=not/here.csv"], world=2)
