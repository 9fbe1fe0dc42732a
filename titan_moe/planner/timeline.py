"""When each action of a pipeline's order begins and ends, given what each takes.

An action begins when its rank is free and what it works on has arrived. Sending and receiving go on
beside compute, so that a hop delays the receiver alone. Bubbles, and what uneven stages cost, come
out of it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from titan_moe.config.schedule_csv import Action
from titan_moe.planner.orders import Order

SecondsOf = Callable[[Action], float]
HopSeconds = Callable[[int, int], float]
"""From one stage to its neighbour, either way, on another rank."""

# Rounds of micro-batches until what comes in turns repeats itself, to begin with; if it does not
# yet, twice as many are looked at.
FIRST_ROUNDS = 3
SAME = 1e-9  # relative: two rounds that take as long


@dataclass(frozen=True)
class Timed:
    """seconds: until the last rank is done. busy: of each rank, in actions.

    spans: of each rank its actions, with begin and end; empty where there would be too many.
    """

    seconds: float
    busy: tuple[float, ...]
    spans: tuple[tuple[tuple[Action, float, float], ...], ...] = ()


def simulate(order: Order, seconds_of: SecondsOf, hop_seconds: HopSeconds) -> Timed:
    """Run an order to its end. AssertionError: one that waits for itself."""
    holders = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    last = max(holders)
    ends: dict[tuple[int, str, int], float] = {}
    free = [0.0] * len(order)
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in order]

    def ready(action: Action) -> float | None:
        """When all that it needs is there; None: not yet known."""
        needed = _needed(action, last)
        arrived = 0.0
        for stage, kind, micro_batch in needed:
            end = ends.get((stage, kind, micro_batch))
            if end is None:
                return None
            hop = holders[stage] != holders[action.stage]
            arrived = max(arrived, end + (hop_seconds(stage, action.stage) if hop else 0.0))
        return arrived

    waiting = list(range(len(order)))
    while waiting:
        moved = False
        for rank in list(waiting):
            actions = order[rank]
            while len(spans[rank]) < len(actions):
                action = actions[len(spans[rank])]
                arrived = ready(action)
                if arrived is None:
                    break
                begin = max(free[rank], arrived)
                free[rank] = end = begin + seconds_of(action)
                # For those who wait, a backward in one part is the part that gives inputs' too.
                kind = "I" if action.kind == "B" else action.kind
                ends[action.stage, kind, action.micro_batch] = end
                spans[rank].append((action, begin, end))
                moved = True
            if len(spans[rank]) == len(actions):
                waiting.remove(rank)
        assert moved or not waiting, "an order in which ranks wait for each other"
    busy = tuple(sum(end - begin for _, begin, end in of_rank) for of_rank in spans)
    return Timed(max(free), busy, tuple(map(tuple, spans)))


def simulate_many(
    order_with: Callable[[int], Order],
    ranks: int,
    micro_batches: int,
    seconds_of: SecondsOf,
    hop_seconds: HopSeconds,
) -> Timed:
    """As `simulate(order_with(micro_batches), ...)` without its spans, in the time of a few rounds.

    In the steady state one more round, a micro-batch per rank, takes each time as long: the rest is
    counted by rounds. seconds_of looks at an action's stage and kind alone.
    """
    rounds, rest = divmod(micro_batches, ranks)
    few = FIRST_ROUNDS
    while few + 2 < rounds:
        shorter, short, longer = (
            simulate(order_with((few + more) * ranks + rest), seconds_of, hop_seconds)
            for more in range(3)
        )
        first, second = short.seconds - shorter.seconds, longer.seconds - short.seconds
        if abs(first - second) <= SAME * longer.seconds:
            left = rounds - few - 2
            busy = tuple(
                long + left * (long - less)
                for long, less in zip(longer.busy, short.busy, strict=True)
            )
            return Timed(longer.seconds + left * second, busy)
        few *= 2
    whole = simulate(order_with(micro_batches), seconds_of, hop_seconds)
    return Timed(whole.seconds, whole.busy)


def _needed(action: Action, last: int) -> list[tuple[int, str, int]]:
    """Ends that an action waits for, besides its rank."""
    stage, kind, micro_batch = action
    if kind == "F":
        return [(stage - 1, "F", micro_batch)] if stage else []
    if kind == "W":
        return [(stage, "I", micro_batch)]
    before = [(stage, "F", micro_batch)]
    return before if stage == last else [*before, (stage + 1, "I", micro_batch)]
