"""Whether a checkpoint holds just what the model needs: names, shapes and types."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

Signature = tuple[tuple[int, ...], torch.dtype]

MAX_NAMES = 8  # of each kind of difference in a message, so that it stays readable


@dataclass(frozen=True)
class Differences:
    """How a checkpoint differs from what is wanted of it.

    missing: wanted and not stored.   unwanted: stored and not wanted.
    unlike: name -> (stored, wanted) where shape or type differ.
    """

    missing: frozenset[str]
    unwanted: frozenset[str]
    unlike: dict[str, tuple[Signature, Signature]]

    @classmethod
    def between(
        cls, stored: Mapping[str, Signature], wanted: Mapping[str, Signature]
    ) -> "Differences":
        """What one rank sees; each rank of a pipeline wants only its own share."""
        return cls(
            missing=frozenset(wanted.keys() - stored.keys()),
            unwanted=frozenset(stored.keys() - wanted.keys()),
            unlike={
                name: (stored[name], wanted[name])
                for name in wanted.keys() & stored.keys()
                if stored[name] != wanted[name]
            },
        )

    @classmethod
    def of_all_ranks(cls, of_each: Sequence["Differences"]) -> "Differences":
        """What all ranks see together: unwanted is only what none of them wants."""
        return cls(
            missing=frozenset.union(*(each.missing for each in of_each)),
            unwanted=frozenset.intersection(*(each.unwanted for each in of_each)),
            unlike={name: pair for each in of_each for name, pair in each.unlike.items()},
        )

    def complaints(self, cast_floats: bool = False) -> list[str]:
        """A line for each kind of difference.

        cast_floats: one floating-point type may stand for another.
        """
        unlike = [
            f"{name} is {_shown(stored)} there, {_shown(wanted)} here"
            for name, (stored, wanted) in sorted(self.unlike.items())
            if not (cast_floats and _castable(stored, wanted))
        ]
        kinds = [
            ("not in the checkpoint", sorted(self.missing)),
            ("not in the model", sorted(self.unwanted)),
            ("of another shape or type", unlike),
        ]
        return [f"{what}: {_listed(names)}" for what, names in kinds if names]


def _castable(stored: Signature, wanted: Signature) -> bool:
    both_floats = stored[1].is_floating_point and wanted[1].is_floating_point
    return stored[0] == wanted[0] and both_floats


def _shown(signature: Signature) -> str:
    shape, dtype = signature
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
