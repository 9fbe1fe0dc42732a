"""The command line: what each key makes of the text that it is given."""

from pathlib import Path

import pytest

from titan_moe.config import ConfigError, RunConfig, load_config

YARN = "{type = 'yarn', factor = 2, original_max_seq_len = 64}"


def load(*overrides: str) -> RunConfig:
    return load_config("tiny.toml", overrides)


def told(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return str(caught.value)


def test_types(start: Path) -> None:
    config = load(
        "--training.steps=200",
        "--optimizer.lr", "2e-4",
        "--optimizer.eps=1e-5",
        "--training.max_norm=2",
        "--training.document_mask=false",
        "--lr_scheduler.decay_type=cosine",
        "--training.dataloader.num_workers=2",
        "--checkpoint.load_step", "-1",
    )  # fmt: skip
    assert (config.training.steps, config.optimizer.lr, config.optimizer.eps) == (200, 2e-4, 1e-5)
    assert config.training.max_norm == 2.0
    assert config.training.document_mask is False
    assert config.lr_scheduler.decay_type == "cosine"
    assert config.training.dataloader.num_workers == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("plain", "plain"),
        ("two words = fine", "two words = fine"),
        ("1000", "1000"),
        ("true", "true"),
        ("[1]", "[1]"),
        ("", ""),
        ("--x", "--x"),
        ('"quoted"', "quoted"),
        ("'quoted'", "quoted"),
        ("it's", "it's"),
    ],
)
def test_strings_need_no_quotes(start: Path, text: str, value: str) -> None:
    assert load(f"--job.description={text}").job.description == value


def test_the_last_one_counts(start: Path) -> None:
    assert load("--training.steps=50", "--training.steps=60").training.steps == 60


def test_unions_and_lists(start: Path) -> None:
    assert load("--model.decay_per_layer=1").model.model_dump()["decay_per_layer"] == 1.0
    listed = load("--model.decay_per_layer=[0.1, 2]").model.model_dump()["decay_per_layer"]
    assert listed == [0.1, 2.0]


def test_lists_of_tables(start: Path) -> None:
    config = load("--data.sources=[{name = 'a', path = 'owner/hub'}, {name = 'b', path='x/y'}]")
    assert [(source.name, source.weight) for source in config.data.sources] == [("a", 1), ("b", 1)]
    config = load("--data.sources.1.weight=0.5", "--data.sources.1.path=builtin:python-stdlib")
    assert [source.weight for source in config.data.sources] == [1.0, 0.5]


def test_optional_tables(start: Path) -> None:
    scaling = load(f"--model.rope_scaling={YARN}", "--model.rope_scaling.factor=3.5")
    assert scaling.model.rope_scaling is not None
    assert scaling.model.rope_scaling.factor == 3.5
    assert told("--model.rope_scaling.factor=2").splitlines() == [
        'tiny.toml: missing key model.rope_scaling.type ("yarn": YaRN (arXiv 2309.00071))',
        "tiny.toml: missing key model.rope_scaling.original_max_seq_len "
        "(integer > 0: length before stretching, in tokens)",
    ]


def test_home_is_the_same_to_all_readers(start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = load(
        "--job.dump_folder=~/runs",
        "--data.tokenizer=~/t.json",
        "--data.bos_token=<s>",
        "--data.sources.1.path=~/notes",
        "--validation.sets=[{name = 'v', path = '~/v', max_tokens = 9}]",
        "--checkpoint.initial_load_path=~/step-3",
    )
    paths = [config.job.dump_folder, config.data.tokenizer, config.data.sources[1].path]
    assert paths == ["/home/me/runs", "/home/me/t.json", "/home/me/notes"]
    assert config.validation.sets[0].path == "/home/me/v"
    assert config.checkpoint.initial_load_path == "/home/me/step-3"
    assert load("--job.dump_folder=./x").job.dump_folder == "./x"


def test_sizes_of_the_model(start: Path) -> None:
    config = load("--model.num_layers=4", "--model.num_groups=2")
    assert config.model.num_layers == 4
    assert config.model.model_dump()["num_groups"] == 2


def test_the_recipe_may_be_named_here(start: Path) -> None:
    said = told("--model.recipe=tiny_recpie")
    assert said.startswith('command line: model.recipe = "tiny_recpie": no such module')
    (start / "tiny.toml").write_text(
        (start / "tiny.toml").read_text().replace('recipe = "tiny_recipe"', "")
    )
    config = load("--model.recipe=tiny_recipe", "--model.num_groups=4")
    assert config.model.recipe == "tiny_recipe"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--training.steps"], "--training.steps has no value: write --training.steps=value"),
        (
            ["--training.steps", "--job.name=x"],
            "--training.steps has no value: write --training.steps=value",
        ),
        (["--steps=3"], "--steps=3: expected --section.key=value, for example --training.steps=10"),
        (["extra"], "extra: expected --section.key=value, for example --training.steps=10"),
        (["--training.steps=abc"], 'training.steps = "abc": expected integer > 0'),
        (["--training.steps=1\nx=2"], 'training.steps = "1\\nx=2": expected integer > 0'),
        (["--training.steps=4.0"], "training.steps = 4.0: expected integer > 0; write 4"),
        (["--training.document_mask=True"], 'training.document_mask = "True": expected true or '
         "false"),
        (["--trianing.steps=3"], "unknown key trianing.steps; did you mean training.steps?"),
        (["--training.steps.x=3"], "unknown key training.steps.x"),
        (["--training.0.x=3"], "unknown key training.0.x"),
        (["--data.sources.2.path=x"], "data.sources.2.path: data.sources has 2 entries, from 0 on"),
        (["--data.sources.².path=x"], "unknown key data.sources.².path; "
         "did you mean data.sources.path?"),
        (["--data.sources." + "9" * 5000 + ".path=x"], f"unknown key data.sources.{'9' * 5000}.path"
         "; did you mean data.sources.path?"),
        (["--validation.sets.0.path=x"], "validation.sets.0.path: there is no list "
         "validation.sets"),
    ],
)  # fmt: skip
def test_what_it_refuses(start: Path, arguments: list[str], said: str) -> None:
    assert told(*arguments) == f"command line: {said}"
