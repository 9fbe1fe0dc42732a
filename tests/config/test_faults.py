"""Each way to get a config wrong, and what the person is told: file, key, value, remedy."""

from pathlib import Path

import pytest

from tests.config.conftest import TINY, Message
from titan_moe.config import ConfigError, load_config


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        pytest.param(
            "steps = 100",
            "stpes = 100\nsteps = 100",
            "tiny.toml: unknown key training.stpes; did you mean training.steps?",
            id="misspelt",
        ),
        pytest.param(
            "steps = 100",
            "steps = 100\nweight_decay = 0.1",
            "tiny.toml: unknown key training.weight_decay; did you mean optimizer.weight_decay?",
            id="in another table",
        ),
        pytest.param(
            "[job]",
            "steps = 10\n[job]",
            "tiny.toml: unknown key steps; did you mean training.steps?",
            id="without its table",
        ),
        pytest.param(
            "[lr_scheduler]\nwarmup_steps = 10",
            "[lr_schedule]",
            "tiny.toml: unknown key lr_schedule; did you mean lr_scheduler?",
            id="table",
        ),
        pytest.param(
            "weight = 2",
            "wieght = 2",
            "tiny.toml: unknown key data.sources.1.wieght; did you mean data.sources.1.weight?",
            id="in a list of tables",
        ),
        pytest.param(
            "steps = 100",
            "steps = 100\nxyzzy = 1",
            "tiny.toml: unknown key training.xyzzy",
            id="like nothing",
        ),
        pytest.param(
            "[job]",
            '"training.steps" = 2\n[job]',
            'tiny.toml: unknown key "training.steps"; write training.steps, without the quotes',
            id="in quotes",
        ),
        pytest.param(
            "steps = 100",
            'steps = 100\n"dataloader.num_workes" = 2',
            'tiny.toml: unknown key training."dataloader.num_workes"; '
            "did you mean training.dataloader.num_workers?",
            id="in quotes and misspelt",
        ),
        pytest.param(
            "num_experts = 4",
            "num_experts = 4\nnum_group = 2",
            "tiny.toml: unknown key model.num_group; did you mean model.num_groups?",
            id="of the recipe",
        ),
    ],
)
def test_unknown_keys_name_the_nearest(message: Message, old: str, new: str, said: str) -> None:
    assert message(old, new) == said


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("steps = 100", 'steps = "100"', '"100": expected integer > 0; write 100 without quotes'),
        ("steps = 100", 'steps = "ten"', '"ten": expected integer > 0'),
        ("steps = 100", "steps = 100.0", "100.0: expected integer > 0; write 100"),
        ("steps = 100", "steps = 2.5", "2.5: expected integer > 0"),
        ("steps = 100", "steps = true", "true: expected integer > 0"),
        ("steps = 100", "steps = 0", "0: expected integer > 0"),
        ("steps = 100", "steps = [1]", "[1]: expected integer > 0"),
        ("steps = 100", "steps = 2020-01-01", "2020-01-01: expected integer > 0"),
        ("lr = 1e-3", "lr = nan", "nan: expected number > 0; it must be finite"),
        ("lr = 1e-3", "lr = inf", "inf: expected number > 0; it must be finite"),
        ("lr = 1e-3", "lr = true", "true: expected number > 0"),
        ("lr = 1e-3", "lr = -1", "-1: expected number > 0"),
        ("rope_theta = 10000.0", "rope_theta = 1.0", "1.0: expected number > 1.0"),
        ("add_bos = true", "add_bos = 1", "1: expected true or false"),
        ("add_bos = true", 'add_bos = "true"', '"true": expected true or false; '
         "write true without quotes"),
        ('name = "tiny"', "name = 7", '7: expected string, not empty, at most 255 long, '
         'of the form ^[A-Za-z0-9_-][A-Za-z0-9._-]*$; write "7"'),
        ("top_k = 2", "top_k = 2\ndecay_per_layer = true",
         "true: expected number or list of numbers"),
        ("top_k = 2", "top_k = 2\nrope_scaling = 2", "2: expected table"),
    ],
)  # fmt: skip
def test_wrong_values_tell_what_was_expected(
    message: Message, old: str, new: str, said: str
) -> None:
    key = new.splitlines()[-1].split(" = ")[0]
    tables = {"steps": "training", "lr": "optimizer", "add_bos": "data", "name": "job"}
    assert message(old, new) == f"tiny.toml: {tables.get(key, 'model')}.{key} = {said}"


def test_literals_name_the_nearest(message: Message) -> None:
    said = message("warmup_steps = 10", 'decay_type = "cosin"')
    choice = '"linear" | "sqrt" | "cosine"; did you mean "cosine"?'
    assert said == f'tiny.toml: lr_scheduler.decay_type = "cosin": expected {choice}'


def test_wrong_item_of_a_list(message: Message) -> None:
    said = message("top_k = 2", 'top_k = 2\ndecay_per_layer = [0.1, "x"]')
    assert said == 'tiny.toml: model.decay_per_layer.1 = "x": expected number'


def test_parallel_degree(message: Message) -> None:
    key = "parallelism.data_parallel_shard_degree"
    said = message("[job]", "[parallelism]\ndata_parallel_shard_degree = 2.5\n[job]")
    assert said == f"tiny.toml: {key} = 2.5: expected integer"
    said = message("[job]", "[parallelism]\ndata_parallel_shard_degree = 0\n[job]")
    assert said == f"tiny.toml: {key} = 0: expected 1 or more, or -1: what the world leaves"


def test_missing_keys(message: Message) -> None:
    assert message("steps = 100", "") == (
        "tiny.toml: missing key training.steps (integer > 0: optimizer steps)"
    )
    assert message("[optimizer]\nlr = 1e-3\n", "") == (
        "tiny.toml: missing key optimizer.lr (number > 0: peak learning rate; always explicit)"
    )
    assert message('name = "notes"\n', "") == (
        "tiny.toml: missing key data.sources.1.name "
        "(string, not empty: name in logs and in the checkpoint)"
    )


def test_shapes_of_tables(message: Message) -> None:
    assert message("[job]\nname = ", "job = ") == 'tiny.toml: job = "tiny": expected a table, [job]'
    first, second = (f"[[data.sources]]{text}" for text in TINY.split("[[data.sources]]")[1:])
    said = message(first + second, first.replace("[[data.sources]]", "[data.sources]"))
    assert said.startswith('tiny.toml: data.sources = {name = "stdlib", path = ')
    assert said.endswith("expected list of tables, not empty; write [[data.sources]]")


def test_empty_list(message: Message) -> None:
    said = message("", "", "--data.sources=[]")
    assert said == "command line: data.sources = []: expected list of tables, not empty"


def test_folders_stay_in_the_run(message: Message) -> None:
    said = message("[job]", '[checkpoint]\nfolder = "../elsewhere"\n[job]')
    assert said == (
        'tiny.toml: checkpoint.folder = "../elsewhere": '
        "expected a folder below the run folder, without .."
    )


def test_the_name_fits_a_folder(message: Message, start: Path) -> None:
    said = message("", "", f"--job.name={'n' * 256}")
    assert said.endswith("n...: expected string, not empty, at most 255 long, of "
                         "the form ^[A-Za-z0-9_-][A-Za-z0-9._-]*$")  # fmt: skip
    assert load_config("tiny.toml", [f"--job.name={'n' * 255}"]).job.name == "n" * 255


@pytest.mark.parametrize(
    "key",
    [
        "job.dump_folder",
        "data.tokenizer",
        "data.sources.0.path",
        "checkpoint.folder",
        "checkpoint.initial_load_path",
        "metrics.save_tb_folder",
    ],
)
def test_no_path_holds_nul(message: Message, key: str) -> None:
    said = message("", "", f"--{key}=a\0b")
    assert said == f'command line: {key} = "a\\u0000b": a path holds no NUL character'


def test_more_than_toml_can_count(message: Message, start: Path) -> None:
    deep = "[" * 1000 + "]" * 1000
    for value, fault in {
        "9" * 5000: "an integer of thousands of digits (at line 23)",
        deep: "nested too deeply (at line 23)",
        "1\nx" + ".a" * 3000 + " = 1": "nested too deeply (at line 24)",
        "1\nx" + ".a" * 60 + " = 1": f"training.x{'.a' * 31}: nested too deeply",
        "0x" + "f" * 4000: "training.steps: an integer of more than 64 bits",
        f"{2**63}": "training.steps: an integer of more than 64 bits",
    }.items():
        said = message("steps = 100", f"steps = {value}")
        assert said == f"tiny.toml: not valid TOML: {fault}"
    for value in ("9" * 5000, deep, "0x" + "f" * 4000):
        said = message("", "", f"--training.steps={value}")
        assert said.startswith(f'command line: training.steps = "{value[:60]}')
        assert said.endswith("...: expected integer > 0")
    (start / "tiny.toml").write_text(TINY)
    assert load_config("tiny.toml", [f"--debug.seed={2**63 - 1}"]).debug.seed == 2**63 - 1


def test_all_faults_come_together(message: Message) -> None:
    said = message("steps = 100", "colour = 1", "--optimizer.lr=x", "--training.sq_len=1")
    assert said.splitlines() == [
        "command line: unknown key training.sq_len; did you mean training.seq_len?",
        "tiny.toml: missing key training.steps (integer > 0: optimizer steps)",
        "tiny.toml: unknown key training.colour",
        'command line: optimizer.lr = "x": expected number > 0',
    ]


def test_checks_of_the_recipe(message: Message) -> None:
    said = message("top_k = 2", "top_k = 2\nnum_groups = 3")
    assert said == "tiny.toml: [model] num_groups = 3 does not divide 4"
    said = message("", "", "--model.num_groups=3")
    assert said == "command line: [model] num_groups = 3 does not divide 4"


def test_checks_of_every_model(message: Message) -> None:
    said = message("top_k = 2", "top_k = 5")
    assert said == "tiny.toml: [model] top_k = 5 is more than num_experts = 4"
    said = message("top_k = 2", "top_k = 2\nnum_dense_layers = 3")
    assert said == "tiny.toml: [model] num_dense_layers = 3 is more than num_layers = 2"


def test_the_recipe_itself(message: Message, start: Path) -> None:
    key = "tiny.toml: model.recipe"
    for name, fault in {
        "tiny_recpie": "no such module; did you mean tiny_recipe?",
        "elsewhere.model": "no such module; it must be installed, or lie in the folder that "
        "the run starts from",
        "tiny recipe": "expected a dotted module name, for example recipes.deepseek_v3",
        "json": "the module has no RECIPE whose config is a ModelConfig",
    }.items():
        assert message('"tiny_recipe"', f'"{name}"') == f'{key} = "{name}": {fault}'
    assert message('recipe = "tiny_recipe"', "recipe = 3") == f"{key} = 3: expected string"
    assert message('recipe = "tiny_recipe"', "") == (
        "tiny.toml: missing key model.recipe "
        "(string: dotted name of the recipe package, e.g. recipes.deepseek_v3)"
    )


@pytest.mark.parametrize(
    ("name", "code", "why"),
    [
        ("needs_more", "import not_there_at_all", "No module named 'not_there_at_all'"),
        ("has_a_bug", "RECIPE = 1 / 0", "ZeroDivisionError: division by zero"),
        ("gives_up", "raise SystemExit(3)", "SystemExit: 3"),
        ("says_much", "raise ValueError('two\\n lines')", "ValueError: two lines"),
    ],
)
def test_recipes_that_do_not_import(
    message: Message, start: Path, name: str, code: str, why: str
) -> None:
    (start / f"{name}.py").write_text(code)
    said = message('"tiny_recipe"', f'"{name}"')
    assert said == f'tiny.toml: model.recipe = "{name}": its import failed: {why}'


def test_other_faults_are_told_beside_a_recipe_that_does_not_load(message: Message) -> None:
    said = message('"tiny_recipe"', '"no_recipe"', "--training.steps=0", "--model.top_k=x")
    assert [line.partition(": ")[2].split(" ")[0] for line in said.splitlines()] == [
        "model.recipe",
        "training.steps",
    ]


def test_files(start: Path) -> None:
    def told(path: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        return str(caught.value)

    assert told("tinny.toml") == "tinny.toml: no such file; did you mean tiny.toml?"
    (start / "pyproject.toml").touch()
    (start / "train_configs" / "family").mkdir(parents=True)
    (start / "train_configs" / "family" / "small.toml").touch()
    assert told("nope.toml") == "nope.toml: no such file"
    assert told("project.toml") == "project.toml: no such file"
    meant = "did you mean train_configs/family/small.toml?"
    assert told("smal.toml") == f"smal.toml: no such file; {meant}"
    assert told("elsewhere/x.toml") == "elsewhere/x.toml: no such file"
    assert told(".") == ".: cannot be read: Is a directory"
    (start / "cut.toml").write_text("[job]\nname = x y\n")
    assert told("cut.toml") == "cut.toml: not valid TOML: Invalid value (at line 2, column 8)"
    (start / "twice.toml").write_text("[job]\nname = 'x'\nname = 'y'\n")
    assert told("twice.toml").startswith("twice.toml: not valid TOML: ")
    (start / "latin.toml").write_bytes("# Grüße".encode("latin-1"))
    assert told("latin.toml") == "latin.toml: not UTF-8 at byte 4"


def test_a_byte_order_mark_is_no_fault(start: Path) -> None:
    (start / "marked.toml").write_text(TINY, "utf-8-sig")
    assert load_config("marked.toml") == load_config("tiny.toml")


def test_it_is_a_value_error(start: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        load_config("missing.toml")
