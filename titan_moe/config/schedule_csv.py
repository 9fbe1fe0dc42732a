"""A pipeline's order as a file: a line per rank, a comma between actions.

    0F0, 0F1, 0B0, 0B1          stage, action, micro-batch
    1F0, 1B0, 1F1, 1B1

F forward, B backward, or in its place I and later W: gradients of inputs, of weights. Between
actions a cell may be empty: waiting, for the eye alone. `(0F1;1B0)OVERLAP_F_B` is two actions.
"""

import csv
import re
from dataclasses import dataclass
from typing import NamedTuple

ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
PAIR = re.compile(r"\(([^;]*);([^;]*)\)OVERLAP_F_B")


class Action(NamedTuple):
    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Order:
    """What a file says.

    stage_ranks: the rank that holds each stage. micro_batches: as many as every stage takes.
    """

    stage_ranks: tuple[int, ...]
    micro_batches: int
    splits_backward: bool


def read_order(path: str, ranks: int) -> Order:
    """Read and check a file; what it leaves can be run to its end by `ranks` ranks.

    Raises:
        ValueError: an unknown action, another number of ranks, a stage on two ranks or on none, an
            action that is missing, twice there, or waits for ever; the message names it.
        OSError: the file cannot be read.
    """
    with open(path, newline="", encoding="utf-8") as file:
        rows = [_actions(row, f"{path}:{line}") for line, row in enumerate(csv.reader(file), 1)]
    if len(rows) != ranks:
        raise ValueError(
            f"{path}: {len(rows)} lines, but parallelism.pipeline_parallel_degree = {ranks}; a "
            f"line per rank"
        )
    holders: dict[int, int] = {}
    for rank, actions in enumerate(rows):
        for action in actions:
            if holders.setdefault(action.stage, rank) != rank:
                raise ValueError(
                    f"{path}:{rank + 1}: {action}, but line {holders[action.stage] + 1} "
                    f"has that stage"
                )
    stages = len(holders)
    if sorted(holders) != list(range(stages)):
        raise ValueError(f"{path}: stages {sorted(holders)} do not count from 0 without a gap")
    micro_batches = 1 + max(action.micro_batch for actions in rows for action in actions)
    splits_backward = _is_complete(rows, stages, micro_batches, path)
    _comes_to_an_end(rows, stages, path)
    return Order(tuple(holders[stage] for stage in range(stages)), micro_batches, splits_backward)


def _actions(row: list[str], place: str) -> list[Action]:
    """Those of one rank."""
    texts: list[str] = []
    for cell in (cell.strip() for cell in row):
        pair = PAIR.fullmatch(cell)
        texts += [text.strip() for text in pair.groups()] if pair else [cell] if cell else []
    actions = []
    for text in texts:
        found = ACTION.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{place}: {text!r} is no action; write stage, one of F, B, I, W, micro-batch: 0F0"
            )
        actions.append(Action(int(found[1]), found[2], int(found[3])))
    if not actions:
        raise ValueError(f"{place}: no action; each line is a rank's")
    return actions


def _is_complete(rows: list[list[Action]], stages: int, micro_batches: int, path: str) -> bool:
    """Whether backward is split anywhere; every stage takes each micro-batch there and back."""
    seen: dict[tuple[int, int], list[str]] = {
        (stage, index): [] for stage in range(stages) for index in range(micro_batches)
    }
    for actions in rows:
        for action in actions:
            seen[action.stage, action.micro_batch].append(action.kind)
    for (stage, index), kinds in seen.items():
        if kinds not in (["F", "B"], ["F", "I", "W"]):
            raise ValueError(
                f"{path}: stage {stage} has {', '.join(kinds) or 'nothing'} for micro-batch "
                f"{index}; it must be F, B or F, I, W, in that order and once each"
            )
    return any("I" in kinds for kinds in seen.values())


def _comes_to_an_end(rows: list[list[Action]], stages: int, path: str) -> None:
    """Run the order in the mind: a rank goes on when what its next action waits for is done."""
    done: set[Action] = set()
    place = [0] * len(rows)

    def is_ready(action: Action) -> bool:
        stage, kind, index = action
        if kind == "F":
            return stage == 0 or Action(stage - 1, "F", index) in done
        if kind == "W":
            return True  # after its own I, which is on the same rank
        return stage == stages - 1 or bool(
            {Action(stage + 1, "B", index), Action(stage + 1, "I", index)} & done
        )

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(rows):
            while place[rank] < len(actions) and is_ready(actions[place[rank]]):
                done.add(actions[place[rank]])
                place[rank] += 1
                moved = True
    stuck = [
        f"line {rank + 1} at {actions[place[rank]]}"
        for rank, actions in enumerate(rows)
        if place[rank] < len(actions)
    ]
    if stuck:
        raise ValueError(f"{path}: the ranks wait for each other for ever: {', '.join(stuck)}")
