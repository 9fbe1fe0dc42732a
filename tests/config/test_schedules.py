"""The table of pipeline schedules against torch's own classes, and files of an order."""

import contextlib
import io
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _simulate_comms_compute,
    get_schedule_class,
)

from tests.metrics.configs import run_config
from titan_moe.config.schedule_csv import read_order
from titan_moe.config.schedules import (
    SCHEDULES,
    micro_batches,
    micro_batches_fault,
    num_stages,
    splits_backward,
    stage_ranks,
)
from titan_moe.config.sections import Parallelism

NOT_COMPUTE_OR_SEND = ("UNSHARD", "RESHARD", "REDUCE_GRAD")


def section_of(name: Any, ranks: int, **keys: Any) -> Parallelism:
    return Parallelism(pipeline_parallel_degree=ranks, pipeline_parallel_schedule=name, **keys)


def torch_takes(name: str, ranks: int, per_rank: int, micro_batches: int) -> Any:
    """torch's schedule, its order having been run dry to its end; None: it refuses."""
    stages: list[Any] = [
        SimpleNamespace(
            num_stages=ranks * per_rank,
            group_size=ranks,
            group_rank=0,
            stage_index=index,
            submod=None,
        )
        for index in range(per_rank)
    ]
    kind = get_schedule_class(name)
    single = issubclass(kind, PipelineScheduleSingle)
    if single and per_rank > 1:
        return None
    try:
        schedule = kind(stages[0] if single else stages, micro_batches, loss_fn=lambda x, y: x)
    except ValueError:
        return None
    if not single:
        orders = {
            rank: [
                part
                for action in actions
                for part in (action.sub_actions or (action,))
                if part.computation_type.value not in NOT_COMPUTE_OR_SEND
            ]
            for rank, actions in schedule.pipeline_order_with_comms.items()
        }
        rank_of = schedule.stage_index_to_group_rank
        with contextlib.redirect_stdout(io.StringIO()):
            _simulate_comms_compute(orders, lambda stage: rank_of[stage], ranks * per_rank)
    return schedule


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_takes_what_the_table_takes_and_nothing_else(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    for ranks in (2, 3, 4):
        for per_rank in (1, 2, 3):
            section = section_of(name, ranks, pipeline_parallel_stages_per_rank=per_rank)
            for count in range(1, 14):
                schedule = torch_takes(name, ranks, per_rank, count)
                try:
                    fault = micro_batches_fault(section, count)
                except ValueError as error:
                    fault = str(error)
                assert (schedule is None) == (fault is not None), (section, count, fault)
                if schedule is not None and not isinstance(schedule, PipelineScheduleSingle):
                    theirs = schedule.stage_index_to_group_rank
                    assert list(stage_ranks(section)) == [theirs[s] for s in sorted(theirs)]


def test_which_orders_split_backward() -> None:
    for name, schedule in SCHEDULES.items():
        made = torch_takes(name, 2, schedule.stages_per_rank, 8)
        if isinstance(made, PipelineScheduleSingle):
            assert not schedule.splits_backward
            continue
        kinds = {
            part.computation_type.value
            for actions in made.pipeline_order.values()
            for action in actions
            if action is not None
            for part in (action.sub_actions or (action,))
        }
        assert schedule.splits_backward == ("W" in kinds), name
        assert splits_backward(section_of(name, 2)) == schedule.splits_backward


def test_stages_go_round_or_there_and_back() -> None:
    assert stage_ranks(section_of("1F1B", 4)) == (0, 1, 2, 3)
    assert stage_ranks(section_of("LoopedBFS", 2)) == (0, 1, 0, 1)
    assert stage_ranks(section_of("DualPipeV", 3)) == (0, 1, 2, 2, 1, 0)
    three = section_of("Interleaved1F1B", 2, pipeline_parallel_stages_per_rank=3)
    assert stage_ranks(three) == (0, 1, 0, 1, 0, 1)
    assert num_stages(section_of("ZBVZeroBubble", 1)) == 1


def test_messages_show_the_arithmetic() -> None:
    fault = micro_batches_fault(section_of("1F1B", 4), 3)
    assert fault == "1F1B needs a micro-batch per stage, but has 3 for 4 stages"
    fault = micro_batches_fault(section_of("DualPipeV", 4), 7)
    assert fault == "DualPipeV needs a micro-batch per stage, but has 7 for 8 stages"
    fault = micro_batches_fault(section_of("Interleaved1F1B", 4), 9)
    assert "9 // 4 ranks = 2 rounds" in str(fault)
    with pytest.raises(ValueError, match="stages_per_rank = 2: GPipe has exactly 1"):
        num_stages(section_of("GPipe", 2, pipeline_parallel_stages_per_rank=2))


def test_micro_batches_are_cut_from_the_rows_of_one_pass() -> None:
    config = run_config(
        training={"local_batch_size": None, "global_batch_size": 24},
        parallelism={"pipeline_parallel_microbatch_size": 3},
    )
    assert micro_batches(config, dp_degree=2) == 4
    with pytest.raises(ValueError, match="microbatch_size = 3: does not divide the 8 rows"):
        micro_batches(config, dp_degree=3)
    halves = run_config(
        training={"local_batch_size": 6, "global_batch_size": 24},
        parallelism={"pipeline_parallel_microbatch_size": 3},
    )
    assert micro_batches(halves, dp_degree=2) == 2


GPIPE = "0F0,0F1,,,0B0,0B1\n,1F0,1F1,1B0,1B1\n"


def test_an_order_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text(GPIPE)
    section = section_of("1F1B", 2, pipeline_parallel_schedule_csv=str(path))
    assert stage_ranks(section) == (0, 1)
    assert not splits_backward(section)
    assert micro_batches_fault(section, 2) is None
    fault = micro_batches_fault(section, 3)
    assert "an order for 2 micro-batches, not for 3" in str(fault)

    path.write_text(
        "0F0, 0F1, 3F0, (3F1;3B0)OVERLAP_F_B, 3I1, 0I0, 3W1, 0B1, 0W0\n"
        "1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1"
    )
    order = read_order(str(path), 2)
    assert order.stage_ranks == (0, 1, 1, 0)
    assert order.micro_batches == 2
    assert order.splits_backward


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n", "1 lines, but parallelism.pipeline_parallel_degree = 2"),
        ("0F0,0X0\n1F0,1B0\n", "order.csv:1: '0X0' is no action"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0\n", "'0SEND_F0' is no action"),
        ("0F0,0B0\n\n", "order.csv:2: no action"),
        ("0F0,0B0\n0F0,0B0\n", "order.csv:2: 0F0, but line 1 has that stage"),
        ("0F0,0B0\n2F0,2B0\n", "do not count from 0"),
        ("0F0,0B0\n1F0\n", "stage 1 has F for micro-batch 0"),
        ("0F0,0B0\n1F1,1B1\n", "stage 0 has nothing for micro-batch 1"),
        ("0F0,0B0\n1B0,1F0\n", "stage 1 has B, F for micro-batch 0"),
        ("0F0,0B0\n1F0,1I0\n", "stage 1 has F, I for micro-batch 0"),
        ("0F0,0B0,0B0\n1F0,1B0\n", "stage 0 has F, B, B"),
        ("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n", "for ever: line 1 at 0B0, line 2 at 1F1"),
    ],
)
def test_files_that_are_no_order(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "order.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_order(str(path), 2)
