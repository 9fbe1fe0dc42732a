"""What a check has to say against a config."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """key: dotted, the one to blame. message: the arithmetic, and the remedy if it is not plain."""

    key: str
    message: str
