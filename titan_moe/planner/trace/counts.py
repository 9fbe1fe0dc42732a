"""What is counted of a traced step, and how it stands for a whole one.

Everything is counted under the moment that it happened in, as moments of one kind repeat: a step
has as many forwards of a stage as it has micro-batches, but adds up gradients once.
"""

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, TypeVar

from titan_moe.planner.message import Message
from titan_moe.planner.trace.short import Cut

Kind = Literal[
    "forward",
    "backward",
    "inputs",
    "weights",
    "pass",
    "gather",
    "reduction",
    "hop",
    "step",
    "optimizer",
]
Of = TypeVar("Of", bound=Hashable)


@dataclass(frozen=True)
class Moment:
    """What a rank is doing. "inputs" and "weights": a backward in two parts. "pass": forward and
    back without a pipeline. "gather": of a stage's weights, by its schedule. "hop": between stages.

    run: which call of the runner. number: the micro-batch of that.
    """

    kind: Kind
    run: int = 0
    stage: int = 0
    number: int = 0

    def __str__(self) -> str:
        if self.kind == "pass":
            return f"micro-batch {self.run}"
        if self.kind in _NAMES:
            return _NAMES[self.kind]
        part = f"{self.kind} of micro-batch {self.number}"
        return part if self.kind in ("forward", "backward") else f"backward for {part}"


_NAMES: dict[Kind, str] = {
    "gather": "gathering a stage's weights",
    "reduction": "reduction of gradients",
    "hop": "between stages",
    "step": "end of the step",
    "optimizer": "optimizer's step",
}


def whole_step(
    counts: Counter[tuple[Moment, Of]], cut: Cut, gathers: dict[int, Fraction]
) -> Counter[Of]:
    """Of all passes and micro-batches that `cut` left out, too.

    gathers: by stage, how many times more often its weights are gathered in a whole pass.
    """
    totals: dict[Of, Fraction] = {}
    for (moment, of), count in counts.items():
        times = Fraction(count) * _times(moment, cut, gathers)
        totals[of] = totals.get(of, Fraction(0)) + times
    assert all(total.denominator == 1 for total in totals.values()), "a part of a message"
    return Counter({of: int(total) for of, total in totals.items() if total})


def _times(moment: Moment, cut: Cut, gathers: dict[int, Fraction]) -> Fraction:
    """How often the moment is there in a whole step."""
    if moment.kind in ("step", "optimizer"):
        return Fraction(1)
    # The first pass stands for those that are left out; the last is the last.
    passes = 1 + (cut.whole_passes - cut.passes) * (moment.run == 0)
    if moment.kind in ("pass", "reduction"):
        return Fraction(passes)
    if moment.kind == "gather":
        return passes * gathers[moment.stage]
    left_out = cut.whole_micro_batches - cut.micro_batches
    if moment.kind == "hop":
        return Fraction(passes * cut.whole_micro_batches, cut.micro_batches)
    # The second micro-batch stands for those that are left out.
    return Fraction(passes * (1 + left_out * (moment.number == 1)))


def messages_of(totals: Counter[Message]) -> tuple[Message, ...]:
    """With their counts, the most bytes first."""
    counted: Iterable[Message] = (
        replace(message, count=count) for message, count in totals.items()
    )
    return tuple(sorted(counted, key=lambda m: (-m.bytes * m.count, str(m))))
