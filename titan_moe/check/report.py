"""What a step of the check says: figures, or what is wrong and where to look."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from titan_moe.check.subject import Subject

INDENT = 25


class WrongError(Exception):
    """what: it is wrong with, in numbers and names. where: to look."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(what, where)
        self.what, self.where = what, where


class UncheckedError(Exception):
    """A step that cannot be done with this recipe, or on this machine; says why."""


class LaterError(Exception):
    """A step of what titan-moe does not have yet; says of what."""


@dataclass(frozen=True)
class Step:
    """One property of a recipe.

    check: returns the figures of a right one; raises WrongError or UncheckedError.
    where: to look if it raises anything else.
    """

    name: str
    about: str
    check: Callable[[Subject], str]
    where: str = "model.py"


@dataclass(frozen=True)
class Outcome:
    """Of one step: "ok", "FAILED", "not checked" or "to come"."""

    step: str
    verdict: str
    said: str


def outcome_of(step: Step, subject: Subject) -> Outcome:
    """Do one step. Whatever it raises is an outcome, not an end."""
    try:
        return Outcome(step.name, "ok", step.check(subject))
    except UncheckedError as why:
        return Outcome(step.name, "not checked", str(why))
    except LaterError as why:
        return Outcome(step.name, "to come", str(why))
    except WrongError as failed:
        return Outcome(step.name, "FAILED", f"{failed.what}\nlook at {failed.where}")
    except Exception as error:
        said = " ".join(str(error).split()) or "no message"
        place = _last_place(error, subject) or subject.file(step.where)
        return Outcome(
            step.name, "FAILED", f"{type(error).__name__}: {said[:600]}\nlook at {place}"
        )


def line_of(outcome: Outcome) -> str:
    """One line, and below it where to look if it failed."""
    said = outcome.said.replace("\n", "\n" + " " * INDENT)
    return f"  {outcome.verdict:<12}{outcome.step:<11}{said}"


def worst(errors: dict[str, float]) -> tuple[str, float]:
    """The name with the largest error, a NaN being the largest of all."""
    name = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))
    return name, errors[name]


def few(names: Sequence[str], most: int = 4) -> str:
    """The first of them, for a message."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _last_place(error: BaseException, subject: Subject) -> str | None:
    """The innermost line of the recipe's own files that an exception passed through."""
    place, trace = None, error.__traceback__
    while trace is not None:
        code: Any = trace.tb_frame.f_code
        if code.co_filename.startswith(str(subject.folder)):
            place = f"{subject.file(code.co_filename.rpartition('/')[2])}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
