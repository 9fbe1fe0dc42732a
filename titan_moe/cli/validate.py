"""`titan-moe validate [CONFIG]`: everything that can be known about a config without torch."""

import os
from collections.abc import Sequence

from titan_moe.config.command_line import config_and_overrides
from titan_moe.config.errors import ConfigError
from titan_moe.config.keys import number_in
from titan_moe.config.layout import Layout
from titan_moe.config.load import load_config
from titan_moe.config.topology import layout_lines
from titan_moe.config.words import counted

HELP = """\
usage: titan-moe validate [CONFIG] [--world N] [--elsewhere] [--section.key=value ...]

Check a config, by default $CONFIG_FILE, else train_configs/debug.toml. Exit code 2 and a line for
each fault if there are any. The files that it names must be here, unless the run is to start
--elsewhere: then nothing is looked for on this machine's disk. With --world, it must also fit
a run of N processes, and how these are laid out is printed.
"""


def main(arguments: Sequence[str]) -> int:
    if {"--help", "-h"} & set(arguments):
        print(HELP, end="")
        return 0
    elsewhere = "--elsewhere" in arguments
    rest, world = _take_world([word for word in arguments if word != "--elsewhere"])
    path, overrides = config_and_overrides(rest, os.environ)
    config = load_config(path, overrides, world, on_disk=not elsewhere)
    if world is None:
        print(f"{path}: valid")
        return 0
    section = config.parallelism
    print(f"{path}: valid on {counted(world, 'process')}")
    print("\n".join(layout_lines(Layout.of(section, world), section.scale_up_size)))
    return 0


def _take_world(arguments: Sequence[str]) -> tuple[list[str], int | None]:
    rest, world = list(arguments), None
    for at, argument in enumerate(arguments):
        name, equals, text = argument.partition("=")
        if name == "--world":
            text = text if equals else "".join(arguments[at + 1 : at + 2])
            world = number_in(text)
            if not world:
                raise ConfigError([f"command line: --world = {text}: expected integer > 0"])
            del rest[at : at + (1 if equals else 2)]
            break
    return rest, world
