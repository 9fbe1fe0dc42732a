"""The one exception that a wrong config raises."""

from collections.abc import Sequence


class ConfigError(ValueError):
    """A config that cannot be run. `faults`: one line each, naming file, key, value and remedy."""

    def __init__(self, faults: Sequence[str]) -> None:
        assert faults, "a ConfigError needs a fault to tell"
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)
