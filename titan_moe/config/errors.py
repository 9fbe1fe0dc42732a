"""What stands against a config: one misfit, and the exception that tells them all."""

from collections.abc import Sequence
from dataclasses import dataclass


class ConfigError(ValueError):
    """A config that cannot be run. `faults`: one line each, naming file, key, value and remedy."""

    def __init__(self, faults: Sequence[str]) -> None:
        assert faults, "a ConfigError needs a fault to tell"
        super().__init__(tuple(faults))  # as given, so that the error survives pickling
        self.faults = tuple(faults)

    def __str__(self) -> str:
        return "\n".join(self.faults)


@dataclass(frozen=True)
class Fault:
    """One misfit between keys that are each valid.

    key: dotted, the one to blame. message: the arithmetic, and the remedy if it is not plain.
    """

    key: str
    message: str
