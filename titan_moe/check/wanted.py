"""What is to be checked. No torch."""

from dataclasses import dataclass
from pathlib import Path

from titan_moe.config.sections import RunConfig


@dataclass(frozen=True)
class Wanted:
    """A recipe to check: name, the folder of its files, the config that gives its sizes."""

    name: str
    folder: Path
    config_file: Path
    config: RunConfig
