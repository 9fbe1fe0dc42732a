"""`[CONFIG] [--section.key=value ...]`: which file, and what overrides it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

DEFAULT_CONFIG = Path("train_configs/debug.toml")
CONFIG_VARIABLE = "CONFIG_FILE"


def config_and_overrides(
    arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[Path, list[str]]:
    """The config file and the overrides that follow it.

    The file is the first argument, else $CONFIG_FILE, else the embedded default: found in the
    current folder, or beside the package.
    """
    if arguments and not arguments[0].startswith("-"):
        return Path(arguments[0]), list(arguments[1:])
    if named := environment.get(CONFIG_VARIABLE):
        return Path(named), list(arguments)
    installed = Path(__file__).parents[2] / DEFAULT_CONFIG
    return DEFAULT_CONFIG if DEFAULT_CONFIG.is_file() else installed, list(arguments)
