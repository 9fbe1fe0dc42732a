"""Lanes against messages written out rank by rank, and what people are warned of."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.planner.test_placement import groups
from titan_moe.config import load_config
from titan_moe.planner.case import Case
from titan_moe.planner.cluster import load_cluster
from titan_moe.planner.figures import SPENT_ON, Lane, StepTime
from titan_moe.planner.message import Message
from titan_moe.planner.trace.rank import trace_rank
from titan_moe.planner.traffic import lanes as timed_lanes
from titan_moe.planner.traffic import warnings

CONFIGS = Path(__file__).parents[2] / "train_configs"
BYTES = 8 * 27 * 25 * 7 * 11 * 13 * 31  # divides evenly wherever it is split here


# Times of messages are another's matter: here each kind has its own round number.
SECONDS = {"tp": 0.5, "cp": 1.5, "ep": 0.25, "dp_shard": 3.0, "efsdp": 1.0, "dp_replicate": 4.0}
SECONDS["pp"] = 0.125


def case_of(world: int, machine: str, /, **parallelism: object) -> Case:
    options = [f"--parallelism.{name}={value}" for name, value in parallelism.items()]
    options += ["--model.num_experts=64", "--training.global_batch_size=512"]
    stack: Any = None  # nothing here asks it
    cluster = load_cluster(CONFIGS / "clusters" / f"{machine}.toml")
    return Case(load_config(CONFIGS / "debug.toml", options), world, cluster, stack)


def time_of(seconds: float, **spent: float) -> StepTime:
    by_name = dict.fromkeys(SPENT_ON, 0.0)
    by_name |= {name.replace("_", " "): value for name, value in spent.items()}
    return StepTime(seconds, by_name, 0.0, 0.0, 0.0, 0.0)


def lanes(case: Case, messages: list[list[Message]], time: StepTime) -> tuple[Lane, ...]:
    return timed_lanes(case, messages, time, lambda case, message: SECONDS[message.dimension])


def sent(dimension: Any, operation: Any, count: int = 1, when: Any = "forward") -> Message:
    return Message(dimension, operation, BYTES, count, when, "test")


def most_abroad(case: Case, message: Message, domain: int) -> float:
    """Bytes over the slow network of the rank that sends most there, each receiver looked up.

    All but an all-to-all go from rank to rank round a ring, of which there is one for each place in
    a domain: its ranks take turns at who is last.
    """
    most = 0.0
    for group in groups(case.layout, message.dimension):
        after = dict(zip(group, group[1:] + group[:1], strict=True))
        for rank in group:
            here = [other for other in group if other // domain == rank // domain]
            if message.operation == "all_to_all":
                share = 1 - (len(here) - 1) / (len(group) - 1)
            else:
                share = sum(after[other] not in here for other in here) / len(here)
            most = max(most, share * message.bytes)
    return most


@pytest.mark.parametrize(
    ("world", "domain", "degrees"),
    [
        (32, 8, {"expert_parallel_degree": 32}),
        (32, 8, {"expert_parallel_degree": 8, "tensor_parallel_degree": 2}),
        (64, 8, {"expert_parallel_degree": 16, "context_parallel_degree": 4}),
        (64, 8, {"data_parallel_replicate_degree": 2, "expert_parallel_degree": 4}),
        (64, 8, {"pipeline_parallel_degree": 4, "expert_parallel_degree": 16}),
        (12, 6, {"expert_parallel_degree": 4}),
        (8, 8, {"expert_parallel_degree": 8}),
    ],
)
def test_bytes_rank_by_rank(world: int, domain: int, degrees: dict[str, int]) -> None:
    case = case_of(world, "h100", **degrees)
    operations = {"ep": "all_to_all", "pp": "send"}
    messages = [sent(name, operations.get(name, "all_gather")) for name in SECONDS]
    found = lanes(case, [messages] * case.layout.pp, time_of(1.0))
    sizes = {**case.layout.dense, **case.layout.sparse}
    sizes["dp_shard"] *= case.layout.cp
    assert {lane.dimension: lane.ranks for lane in found} == {
        name: size for name, size in sizes.items() if size > 1
    }
    for lane in found:
        message = next(m for m in messages if m.dimension == lane.dimension)
        abroad = most_abroad(case, message, domain)
        assert lane.across_bytes_per_step == pytest.approx(abroad), lane
        assert lane.inside_bytes_per_step == BYTES - lane.across_bytes_per_step
        assert lane.tier == ("scale-out" if abroad else "scale-up")


def test_racks_hold_whole_groups() -> None:
    """256 ranks are placed as four times 64, so that groups of 64 stay in racks of 72."""
    case = case_of(256, "gb300_nvl72", expert_parallel_degree=64)
    (ep,) = [
        lane for lane in lanes(case, [[sent("ep", "all_to_all")]], time_of(1.0)) if lane.ranks == 64
    ]
    assert (ep.tier, ep.across_bytes_per_step) == ("scale-up", 0)


def test_counts_and_seconds() -> None:
    """Two pipeline ranks, the second sends more; what is sent once a step is no micro-batch's."""
    case = case_of(16, "h100", pipeline_parallel_degree=2, pipeline_parallel_microbatch_size=4)
    few = [sent("dp_shard", "all_gather")]
    many = [sent("dp_shard", "all_gather", 128), sent("dp_shard", "reduce_scatter", 3, "step")]
    many += [sent("efsdp", "all_gather", 393)]
    time = time_of(500.0, gradients_and_weights=131.0)
    found = {lane.dimension: lane for lane in lanes(case, [few, many], time)}
    assert case.micro_batches == 16
    shard, experts = found["dp_shard"], found["efsdp"]
    assert shard.inside_bytes_per_step + shard.across_bytes_per_step == 131 * BYTES
    assert shard.bytes_per_micro_batch == 128 * BYTES // 16
    assert (shard.seconds, experts.seconds) == (393.0, 393.0)
    assert (shard.exposed_seconds, experts.exposed_seconds) == (65.5, 65.5)
    assert shard.hidden_seconds == 327.5
    assert found["pp"].seconds == found["pp"].inside_bytes_per_step == 0


def test_no_more_is_exposed_than_is_sent() -> None:
    """The rank that a step waits for need not be the one that sends most."""
    case = case_of(16, "h100", expert_parallel_degree=16)
    time = time_of(9.0, **{"expert all-to-all": 2.0})
    by_name = {lane.dimension: lane for lane in lanes(case, [[sent("ep", "all_to_all", 4)]], time)}
    assert (by_name["ep"].seconds, by_name["ep"].exposed_seconds) == (1.0, 1.0)


def test_a_dispatcher_of_two_tiers_tells_which() -> None:
    case = case_of(
        32,
        "h100",
        expert_parallel_degree=32,
        scale_up_size=8,
        expert_parallel_comm_backend="two_tier",
    )
    messages = [
        Message("ep", "all_to_all", 100, 2, "forward", "across", "across"),
        Message("ep", "all_to_all", 700, 2, "forward", "inside", "inside"),
    ]
    ep = next(lane for lane in lanes(case, [messages], time_of(1.0)) if lane.dimension == "ep")
    assert (ep.inside_bytes_per_step, ep.across_bytes_per_step) == (1400, 200)
    assert ep.tier == "scale-out"


def told(case: Case, messages: list[Message], time: StepTime) -> tuple[str, ...]:
    return warnings(case, lanes(case, [messages] * case.layout.pp, time), time)


def test_experts_that_cross_are_told() -> None:
    case = case_of(32, "h100", expert_parallel_degree=32)
    message = Message("ep", "all_to_all", 31_000_000, 1000, "forward", "test")
    (said,) = told(case, [message], time_of(200.0, **{"expert all-to-all": 50.0}))
    assert said == (
        "Experts' all-to-all crosses the fast domain: groups of 32 ranks, domains of 8; 24 of "
        "31 GB per step and rank go over 50 GB/s instead of 450, and the step waits 50 s of 200 "
        "(25%) for it. parallelism.expert_parallel_degree = 8 would stay inside. With "
        'parallelism.expert_parallel_comm_backend = "two_tier" and scale_up_size = 8 a token '
        "crosses once per domain."
    )


def test_two_tiers_are_only_proposed_where_they_can_be() -> None:
    """Domains of 6 do not divide groups of 4."""
    (said,) = told(case_of(12, "h100", expert_parallel_degree=4), [], time_of(1.0))
    assert said.endswith("parallelism.expert_parallel_degree = 2 would stay inside.")


def test_without_times_bytes_are_told_all_the_same() -> None:
    case = case_of(32, "h100", expert_parallel_degree=32)
    messages = [[sent("ep", "all_to_all", 10), sent("dp_shard", "all_gather")]]
    timed, bare = lanes(case, messages, time_of(1.0)), timed_lanes(case, messages)
    assert [replace(lane, seconds=None, exposed_seconds=None) for lane in timed] == list(bare)
    assert all(lane.hidden_seconds is None for lane in bare)
    (said,) = warnings(case, bare)
    assert "go over 50 GB/s instead of 450. parallelism.expert_parallel_degree = 8 would" in said


def test_experts_that_stay_are_not() -> None:
    case = case_of(32, "h100", expert_parallel_degree=8)
    assert (
        told(case, [sent("ep", "all_to_all", 100)], time_of(20.0, **{"expert all-to-all": 9})) == ()
    )


def test_gradients_that_are_late_are_told() -> None:
    case = case_of(32, "h100", expert_parallel_degree=8)
    messages = [sent("dp_shard", "all_gather", 10), sent("efsdp", "all_gather", 10)]
    (said,) = told(case, messages, time_of(100.0, gradients_and_weights=8.0))
    assert said == (
        "Traffic of gradients and weights is not all hidden: the step waits 8 s of 100 (8%) for "
        "dp_shard (32 ranks, scale-out), efsdp (4 ranks, scale-out). More tokens per rank and step "
        "hide more of it."
    )
    assert told(case, messages, time_of(100.0, gradients_and_weights=0.9)) == ()


def test_tensor_parallelism_that_crosses_is_told() -> None:
    case = case_of(32, "h100", tensor_parallel_degree=8)
    assert told(case, [sent("tp", "all_reduce")], time_of(1.0)) == ()
    case = case_of(12, "h100", tensor_parallel_degree=4)
    (said,) = told(case, [sent("tp", "all_reduce")], time_of(1.0))
    assert "groups of 4 ranks, domains of 6" in said
    assert said.endswith("parallelism.tensor_parallel_degree = 2 would stay inside.")


def test_a_domain_that_the_machine_does_not_have_is_told() -> None:
    case = case_of(32, "h100", scale_up_size=16)
    assert told(case, [], time_of(1.0)) == (
        "parallelism.scale_up_size = 16, but a fast domain of H100 has 8 GPUs; the plan takes 8.",
    )


def test_a_lane_alone_is_no_lane() -> None:
    assert lanes(case_of(1, "h100"), [[]], time_of(1.0)) == ()
    found: tuple[Lane, ...] = lanes(case_of(2, "h100"), [[]], time_of(1.0))
    assert [lane.dimension for lane in found] == ["dp_shard", "efsdp"]


FLOAT, ROW = 4, 128 * 4  # bytes


@pytest.mark.parametrize(
    ("backend", "inside", "across"),
    [
        ("flat", 192 * (4 * ROW + 2 * FLOAT), 256 * (4 * ROW + 2 * FLOAT)),
        ("two_tier", 384 * (4 * ROW + 2 * FLOAT), 128 * (4 * ROW + 2 * 2 * FLOAT + 2 * FLOAT)),
    ],
)
def test_experts_traffic_of_a_traced_run_by_hand(backend: str, inside: int, across: int) -> None:
    """Two domains of four ranks; each rank has one of eight experts, and 256 tokens in a step.

    Token t goes to experts 2t and 2t + 1 mod 8, both in one domain. Flat: of its 512 copies a rank
    sends 64 to each of three neighbours, and to each of four ranks abroad. In two tiers 128 tokens
    cross, once each; then 512 copies, of own tokens and of those from abroad, are spread over four
    ranks, of which three are others. Rows of 128 floats go there and back, forward and backward;
    the weight of each choice goes along, and in two tiers a number of four bytes for each.
    """
    keys = ("expert_parallel_degree", "scale_up_size", "expert_parallel_comm_backend")
    options = [
        *[f"--parallelism.{k}={v}" for k, v in zip(keys, (8, 4, backend), strict=True)],
        *["--model.num_layers=2", "--training.global_batch_size=32", "--training.seq_len=64"],
    ]
    stack: Any = None  # nothing here asks it
    cluster = load_cluster(CONFIGS / "clusters" / "h100.toml")
    case = Case(load_config(CONFIGS / "debug.toml", options), 8, cluster, stack)
    messages = list(trace_rank(case, 0, "cpu").messages)
    ep = next(lane for lane in lanes(case, [messages], time_of(1.0)) if lane.dimension == "ep")
    assert (ep.inside_bytes_per_step, ep.across_bytes_per_step) == (inside, across)
