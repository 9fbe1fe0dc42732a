"""What `titan-moe plan` is asked, told apart from a config's keys; and what it cannot be asked."""

from pathlib import Path

import pytest

from titan_moe.cli.plan_options import parse
from titan_moe.config.errors import ConfigError

CLUSTER = "--cluster=here.toml"


def test_options_stand_apart_from_keys_of_the_config() -> None:
    words = ["a.toml", "--cluster", "here.toml", "--training.steps=5", "--gpus", "16", "--json"]
    words += ["--training.seq_len", "64", "--tokens=14.8e12", "--price", "2.5", "--mtbf=5e4"]
    options = parse([*words, "--stack=other", "--precision", "mxfp8", "--imbalance"], {})
    assert (options.config, options.cluster) == (Path("a.toml"), Path("here.toml"))
    assert options.overrides == ("--training.steps=5", "--training.seq_len", "64")
    assert (options.gpus, options.stack, options.precision) == (16, "other", "mxfp8")
    assert (options.tokens, options.price, options.mtbf_hours) == (14.8e12, 2.5, 5e4)
    assert (options.json, options.imbalance, options.search, options.traced) == (
        True,
        True,
        False,
        True,
    )


def test_what_is_not_asked_has_a_default() -> None:
    options = parse([CLUSTER, "--no-trace"], {"CONFIG_FILE": "b.toml"})
    assert (options.config, options.overrides) == (Path("b.toml"), ())
    assert (options.gpus, options.stack, options.precision) == (None, "titan-moe", "bf16")
    assert (options.tokens, options.price, options.mtbf_hours, options.html) == (None,) * 4
    assert not options.traced


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--gpu=8"], "unknown option --gpu; did you mean --gpus?"),
        (["--imbalnce"], "unknown option --imbalnce; did you mean --imbalance?"),
        (["--zzz"], "unknown option --zzz; there are --cluster, --gpus,"),
        (["b.toml"], "b.toml: expected one config; options and --section.key=value follow it"),
        (["--gpus"], "--gpus has no value: write --gpus=value"),
        (["--gpus", "--json"], "--gpus has no value: write --gpus=value"),
        (["--gpus=0"], "--gpus = 0: expected integer > 0"),
        (["--gpus=-8"], "--gpus = -8: expected integer > 0"),
        (["--gpus=8.0"], "--gpus = 8.0: expected integer > 0"),
        (["--tokens=many"], "--tokens = many: expected a number > 0, as in 2.5 or 14.8e12"),
        (["--tokens=nan"], "--tokens = nan: expected a number > 0"),
        (["--mtbf=inf"], "--mtbf = inf: expected a number > 0"),
        (["--tokens=1", "--price=-1"], "--price = -1: expected a number > 0"),
        (["--price=2"], "--price: needs --tokens, those of the whole training"),
        (["--json=yes"], "--json takes no value; leave out =yes"),
        (["--write=best.toml"], "--write: goes with --search, whose best layout it takes"),
        (["--html=none/plan.html"], "--html = none/plan.html: there is no folder none"),
        (["--html=."], "--html = .: this is a folder; name a file"),
    ],
)
def test_a_wrong_option_is_told(words: list[str], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(["a.toml", CLUSTER, *words], {})
    assert len(caught.value.faults) == 1
    assert caught.value.faults[0].startswith(f"command line: {fault}")


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(["a.toml", "--gpu=8", "--tokens=0", "--imbalance=3"], {})
    assert [fault.split(":")[1].split()[0] for fault in caught.value.faults] == [
        "unknown",
        "--imbalance",
        "--tokens",
    ]
