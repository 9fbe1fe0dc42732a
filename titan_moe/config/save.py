"""Write a resolved config so that it loads again to the same."""

import os
from pathlib import Path

import tomli_w

from titan_moe import __version__
from titan_moe.config.sections import RunConfig

HEADER = f"""\
# The resolved config of a run: file, layers and command line in one, defaults included.
# Written by titan-moe {__version__}; it loads again to the same.

"""


def save_config(config: RunConfig, path: Path) -> None:
    """Write `config` as TOML; keys that are None are left out. The file is whole or not there."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(HEADER + tomli_w.dumps(config.model_dump(exclude_none=True)), "utf-8")
    os.replace(partial, path)
