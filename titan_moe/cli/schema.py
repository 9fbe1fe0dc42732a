"""`titan-moe schema [CONFIG]`: JSON Schema, with the keys of the recipe that CONFIG names."""

import json
import os
from collections.abc import Sequence

from titan_moe.config.command_line import config_and_overrides
from titan_moe.config.load import sections_for
from titan_moe.config.schema import json_schema

HELP = """\
usage: titan-moe schema [CONFIG] [--section.key=value ...]

Print the JSON Schema of a config, for editors. [model] has the keys of the recipe that CONFIG
names (by default $CONFIG_FILE, else train_configs/debug.toml).
"""


def main(arguments: Sequence[str]) -> int:
    if {"--help", "-h"} & set(arguments):
        print(HELP, end="")
        return 0
    path, overrides = config_and_overrides(arguments, os.environ)
    print(json.dumps(json_schema(sections_for(path, overrides)), indent=2))
    return 0
