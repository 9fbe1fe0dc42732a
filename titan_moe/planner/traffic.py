"""Traffic by mesh dimension: how much of it, over which network, and what compute does not hide."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import gcd

from titan_moe.config.words import counted
from titan_moe.planner.case import Case
from titan_moe.planner.figures import Dimension, Lane, StepTime
from titan_moe.planner.message import Message
from titan_moe.planner.placement import across_share, domain_ranks, group_of, ranks_together

GRADIENTS = "gradients and weights"
# What of a step's seconds tells how much of a dimension's messages is exposed. Dimensions under one
# entry share it as they share the wire. Innermost dimensions first.
EXPOSED_AS: Mapping[Dimension, str] = {
    "tp": "tensor and context",
    "cp": "tensor and context",
    "ep": "expert all-to-all",
    "dp_shard": GRADIENTS,
    "efsdp": GRADIENTS,
    "dp_replicate": GRADIENTS,
    "pp": "pipeline transfers",
}
GB = 1e9
WORTH_TELLING = 0.01  # of a step


def lanes(
    case: Case,
    messages: Sequence[Sequence[Message]],
    time: StepTime | None = None,
    wire_seconds: Callable[[Case, Message], float] | None = None,
) -> tuple[Lane, ...]:
    """One lane per dimension whose groups have more than one rank, innermost first.

    messages: of each pipeline rank, in order, with counts per whole step. wire_seconds: how long
    one such message takes, hidden or not. Without it and `time` lanes tell bytes alone.
    """
    busiest = {name: _busiest(messages, name) for name in EXPOSED_AS if _ranks(case, name) > 1}
    found = {name: _lane(case, name, sent) for name, sent in busiest.items()}
    if time is None or wire_seconds is None:
        assert time is wire_seconds, "one time tells nothing without the other"
        return tuple(found.values())
    seconds = {
        name: sum(message.count * wire_seconds(case, message) for message in sent)
        for name, sent in busiest.items()
    }
    return tuple(
        replace(lane, seconds=seconds[name], exposed_seconds=_exposed(time, seconds, name))
        for name, lane in found.items()
    )


def _ranks(case: Case, name: Dimension) -> int:
    return group_of(case.layout, name)[0]


def _busiest(messages: Sequence[Sequence[Message]], name: Dimension) -> list[Message]:
    """Those of the pipeline rank that sends most."""
    by_rank = [[m for m in of_rank if m.dimension == name] for of_rank in messages]
    return max(by_rank, key=_bytes)


def _bytes(messages: Iterable[Message]) -> int:
    return sum(message.bytes * message.count for message in messages)


def _exposed(time: StepTime, seconds: Mapping[Dimension, float], name: Dimension) -> float:
    entry = EXPOSED_AS[name]
    of_entry = sum(s for other, s in seconds.items() if EXPOSED_AS[other] == entry)
    share = seconds[name] / of_entry if of_entry else 0.0
    return min(seconds[name], share * time.spent[entry])


def _lane(case: Case, name: Dimension, sent: Sequence[Message]) -> Lane:
    total = _bytes(sent)
    across = round(sum(across_bytes(case, message) for message in sent))
    stays = _together(case, name) == _ranks(case, name)
    return Lane(
        dimension=name,
        ranks=_ranks(case, name),
        tier="scale-up" if stays else "scale-out",
        inside_bytes_per_step=total - across,
        across_bytes_per_step=across,
        bytes_per_micro_batch=_bytes(m for m in sent if m.when != "step") // case.micro_batches,
    )


def across_bytes(case: Case, message: Message) -> float:
    """Of all these messages of one rank, what leaves its fast domain: of the loneliest rank."""
    total = message.bytes * message.count
    if message.tier is not None:
        return float(total) if message.tier == "across" else 0.0
    ranks, together = _ranks(case, message.dimension), _together(case, message.dimension)
    return total * across_share(message.operation, ranks, together)


def _together(case: Case, name: Dimension) -> int:
    return ranks_together(case.layout, name, domain_ranks(case))


def warnings(case: Case, lanes: Sequence[Lane], time: StepTime | None = None) -> tuple[str, ...]:
    """Plain sentences, the weightiest first: what goes over the slow network and should not, what
    the step waits for (if `time` is known, and the lanes were made with it), and a fast domain that
    the machine does not have."""
    by_name = {lane.dimension: lane for lane in lanes}
    return (
        *_domain(case),
        *_tensor(case, by_name.get("tp")),
        *_experts(case, by_name.get("ep"), time),
        *_gradients(lanes, time),
    )


def _domain(case: Case) -> Iterator[str]:
    said, cluster = case.config.parallelism.scale_up_size, case.cluster
    if said is not None and said > cluster.scale_up.gpus:
        yield (
            f"parallelism.scale_up_size = {said}, but a fast domain of {cluster.machine.name} has "
            f"{cluster.scale_up.gpus} GPUs; the plan takes {domain_ranks(case)}."
        )


def _tensor(case: Case, lane: Lane | None) -> Iterator[str]:
    if lane is not None and lane.tier == "scale-out":
        yield (
            f"Tensor parallelism crosses the fast domain: groups of {lane.ranks} ranks, domains of "
            f"{domain_ranks(case)}; all its traffic waits for the slow network. "
            f"{_stays_inside('tensor_parallel_degree', lane.ranks, domain_ranks(case))}"
        )


def _experts(case: Case, lane: Lane | None, time: StepTime | None) -> Iterator[str]:
    if lane is None or lane.tier == "scale-up":
        return
    domain, section = domain_ranks(case), case.config.parallelism
    total = lane.inside_bytes_per_step + lane.across_bytes_per_step
    remedy = _stays_inside("expert_parallel_degree", lane.ranks, domain)
    if section.expert_parallel_comm_backend == "flat" and lane.ranks % domain == 0 and domain > 1:
        remedy += (
            f' With parallelism.expert_parallel_comm_backend = "two_tier" and scale_up_size = '
            f"{domain} a token crosses once per domain."
        )
    waits = ""
    if time is not None:
        waits = f", and the step waits {_of_step(lane.exposed_seconds or 0.0, time)} for it"
    yield (
        f"Experts' all-to-all crosses the fast domain: groups of {lane.ranks} ranks, domains of "
        f"{domain}; {lane.across_bytes_per_step / GB:.3g} of {total / GB:.3g} GB per step and rank "
        f"go over {case.cluster.scale_out.gb_per_second:g} GB/s instead of "
        f"{case.cluster.scale_up.gb_per_second:g}{waits}. {remedy}"
    )


def _gradients(lanes: Sequence[Lane], time: StepTime | None) -> Iterator[str]:
    late = [lane for lane in lanes if EXPOSED_AS[lane.dimension] == GRADIENTS]
    exposed = sum(lane.exposed_seconds or 0.0 for lane in late)
    if time is None or exposed < WORTH_TELLING * time.seconds:
        return
    names = ", ".join(
        f"{lane.dimension} ({counted(lane.ranks, 'rank')}, {lane.tier})"
        for lane in late
        if lane.exposed_seconds
    )
    yield (
        f"Traffic of gradients and weights is not all hidden: the step waits "
        f"{_of_step(exposed, time)} for {names}. More tokens per rank and step hide more of it."
    )


def _stays_inside(key: str, ranks: int, domain: int) -> str:
    return f"parallelism.{key} = {gcd(ranks, domain)} would stay inside."


def _of_step(seconds: float, time: StepTime) -> str:
    return f"{seconds:.3g} s of {time.seconds:.3g} ({100 * seconds / time.seconds:.0f}%)"
