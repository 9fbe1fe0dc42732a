"""What `titan-moe plan` is asked: its options, told apart from a config's keys. Torch-free."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from titan_moe.config.command_line import config_and_overrides
from titan_moe.config.errors import ConfigError
from titan_moe.config.keys import number_in

SWITCHES = ("--imbalance", "--search", "--no-trace", "--json")
WITH_VALUE = (
    "--cluster",
    "--gpus",
    "--stack",
    "--precision",
    "--tokens",
    "--price",
    "--mtbf",
    "--html",
    "--write",
)
DEFAULT_STACK = "titan-moe"
DEFAULT_PRECISION = "bf16"


@dataclass(frozen=True)
class Options:
    """precision: not yet held to what there is. tokens: of the whole training. price: per GPU and
    hour. mtbf_hours: of one GPU with its share of host and network. html, write: files to make."""

    config: Path
    overrides: tuple[str, ...]
    cluster: Path | None
    gpus: int | None
    stack: str
    precision: str
    tokens: float | None
    price: float | None
    mtbf_hours: float | None
    imbalance: bool
    search: bool
    traced: bool
    json: bool
    html: Path | None
    write: Path | None


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Raises ConfigError: one line for each option that is unknown, without a value, or wrong."""
    config, rest = config_and_overrides(arguments, environment)
    values, switches, overrides, faults = _sort(rest)
    gpus, gpus_faults = _count(values, "--gpus")
    tokens, tokens_faults = _positive(values, "--tokens")
    price, price_faults = _positive(values, "--price")
    mtbf_hours, mtbf_faults = _positive(values, "--mtbf")
    faults += gpus_faults + tokens_faults + price_faults + mtbf_faults
    faults += _what_goes_alone(values, switches)
    html, write = values.get("--html"), values.get("--write")
    for name, file in (("--html", html), ("--write", write)):
        faults += [f"command line: {name} = {file}: {why}" for why in _unwritable(file)]
    if faults:
        raise ConfigError(faults)
    return Options(
        config=config,
        overrides=tuple(overrides),
        cluster=Path(cluster) if (cluster := values.get("--cluster")) else None,
        gpus=gpus,
        stack=values.get("--stack", DEFAULT_STACK),
        precision=values.get("--precision", DEFAULT_PRECISION),
        tokens=tokens,
        price=price,
        mtbf_hours=mtbf_hours,
        imbalance="--imbalance" in switches,
        search="--search" in switches,
        traced="--no-trace" not in switches,
        json="--json" in switches,
        html=Path(html) if html else None,
        write=Path(write) if write else None,
    )


def _sort(rest: Sequence[str]) -> tuple[dict[str, str], set[str], list[str], list[str]]:
    """(options with a value, switches, overrides of the config, faults)."""
    values: dict[str, str] = {}
    switches: set[str] = set()
    overrides: list[str] = []
    faults: list[str] = []
    waiting = list(rest)
    while waiting:
        argument = waiting.pop(0)
        name, equals, value = argument.partition("=")
        has_next = bool(waiting) and not waiting[0].startswith("--")
        if name in SWITCHES:
            switches.add(name)
            faults += [f"command line: {name} takes no value; leave out ={value}"] if equals else []
        elif name in WITH_VALUE:
            value = value if equals else (waiting.pop(0) if has_next else "")
            values[name] = value
            faults += [] if value else [f"command line: {name} has no value: write {name}=value"]
        elif name.startswith("--") and "." in name:
            overrides.append(argument)
            if not equals and has_next:
                overrides.append(waiting.pop(0))
        else:
            faults.append(f"command line: {_unknown(name)}")
    return values, switches, overrides, faults


def _unknown(name: str) -> str:
    if not name.startswith("-"):
        return f"{name}: expected one config; options and --section.key=value follow it"
    near = get_close_matches(name, (*SWITCHES, *WITH_VALUE), n=1)
    there = f"there are {', '.join((*WITH_VALUE, *SWITCHES))}"
    return f"unknown option {name}; " + (f"did you mean {near[0]}?" if near else there)


def _what_goes_alone(values: Mapping[str, str], switches: set[str]) -> list[str]:
    faults = []
    if "--search" not in switches and "--write" in values:
        faults.append("command line: --write: goes with --search, whose best layout it takes")
    if "--price" in values and "--tokens" not in values:
        faults.append("command line: --price: needs --tokens, those of the whole training")
    return faults


def _count(values: Mapping[str, str], name: str) -> tuple[int | None, list[str]]:
    text = values.get(name)
    number = number_in(text) if text else None
    wrong = bool(text) and not number
    return number, [f"command line: {name} = {text}: expected integer > 0"] if wrong else []


def _positive(values: Mapping[str, str], name: str) -> tuple[float | None, list[str]]:
    text = values.get(name)
    if not text:
        return None, []
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if 0.0 < number < float("inf"):
        return number, []
    return None, [f"command line: {name} = {text}: expected a number > 0, as in 2.5 or 14.8e12"]


def _unwritable(file: str | None) -> list[str]:
    """What stands against making `file`, so that it is told before a minute of planning."""
    if not file:
        return []
    folder = Path(file).parent
    if not folder.is_dir():
        return [f"there is no folder {folder}"]
    if Path(file).is_dir():
        return ["this is a folder; name a file"]
    return [] if os.access(folder, os.W_OK | os.X_OK) else [f"nothing may be written into {folder}"]
