"""`extends`: files below files, and who is named for what."""

from pathlib import Path

import pytest

from titan_moe.config import ConfigError, load_config
from titan_moe.config.files import Document, read_document


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / f"{name}.toml").write_text(text)


def told(path: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_tables_merge_and_lists_replace(start: Path) -> None:
    write(start, long='extends = "tiny.toml"\n[training]\nsteps = 200\n[job]\nname = "long"\n')
    config = load_config("long.toml")
    assert (config.job.name, config.training.steps, config.training.seq_len) == ("long", 200, 64)
    assert [source.name for source in config.data.sources] == ["stdlib", "notes"]
    write(start, one='extends = "tiny.toml"\n[[data.sources]]\nname = "n"\npath = "notes.jsonl"\n')
    assert [source.name for source in load_config("one.toml").data.sources] == ["n"]


def test_deep_tables_merge(start: Path) -> None:
    scaling = "[model.rope_scaling]\ntype = 'yarn'\nfactor = 4\noriginal_max_seq_len = 64\n"
    write(start, low=f"extends = 'tiny.toml'\n{scaling}")
    write(start, top="extends = 'low.toml'\n[model.rope_scaling]\nfactor = 8\n")
    scaled = load_config("top.toml").model.rope_scaling
    assert scaled is not None
    assert (scaled.factor, scaled.original_max_seq_len) == (8.0, 64)


def test_the_later_of_several_wins_and_the_file_itself_over_all(start: Path) -> None:
    write(start, a="[training]\nsteps = 1\nseq_len = 32\n[optimizer]\nlr = 0.1\n")
    write(start, b="[training]\nsteps = 2\n")
    write(start, c="extends = ['tiny.toml', 'a.toml', 'b.toml']\n[optimizer]\nlr = 0.3\n")
    config = load_config("c.toml", ["--lr_scheduler.warmup_steps=0"])
    assert (config.training.steps, config.training.seq_len, config.optimizer.lr) == (2, 32, 0.3)


def test_paths_are_relative_to_the_file_that_says_them(start: Path) -> None:
    (start / "sub" / "deep").mkdir(parents=True)
    write(start / "sub", base='extends = "../tiny.toml"\n[training]\nsteps = 7\n')
    write(start / "sub" / "deep", top='extends = "../base.toml"\n[lr_scheduler]\nwarmup_steps=0\n')
    assert load_config("sub/deep/top.toml").training.steps == 7
    assert load_config(start / "sub" / "deep" / "top.toml").training.steps == 7


def test_the_file_that_wrote_the_key_is_named(start: Path) -> None:
    (start / "sub").mkdir()
    write(start / "sub", top='extends = "../mid.toml"\n[training]\nseq_len = 0\n')
    write(start, mid='extends = "tiny.toml"\n[training]\nstpes = 1\n[debug]\nseed = -1\n')
    said = told("sub/top.toml", "--optimizer.lr=0")
    assert said.splitlines() == [
        "sub/top.toml: training.seq_len = 0: expected integer > 0",
        "mid.toml: unknown key training.stpes; did you mean training.steps?",
        "command line: optimizer.lr = 0: expected number > 0",
        "mid.toml: debug.seed = -1: expected integer >= 0",
    ]


def test_a_replaced_value_is_laid_to_the_replacer_alone(start: Path) -> None:
    write(start, low='extends = "tiny.toml"\n[training]\nsteps = "bad"\n')
    write(start, top='extends = "low.toml"\n[training]\nsteps = 50\n')
    assert load_config("top.toml").training.steps == 50
    document = read_document(Path("top.toml"))
    assert document.origin(("training", "steps")) == "top.toml"
    assert document.origin(("training", "seq_len")) == "tiny.toml"
    assert document.origin(("data", "sources", 0, "name")) == "tiny.toml"


def test_what_was_replaced_as_a_whole_is_forgotten() -> None:
    document = Document("d")
    for writer, value in {"a": {"x": 1}, "b": {"x": 2}, "c": 3, "d": {"x": 4}}.items():
        document.layer({"table": value}, writer)
    assert document.tree == {"table": {"x": 4}}
    assert document.origin(("table", "x")) == "d"


def test_circles_are_refused(start: Path) -> None:
    write(start, a='extends = "b.toml"\n', b='extends = "./a.toml"\n')
    assert told("a.toml") == "b.toml: extends goes in a circle: a.toml -> b.toml -> a.toml"
    write(start, own='extends = "own.toml"\n')
    assert told("own.toml") == "own.toml: extends goes in a circle: own.toml -> own.toml"
    write(start, around=f'extends = "../{start.name}/around.toml"\n')
    circle = f"around.toml -> ../{start.name}/around.toml"
    assert told("around.toml") == f"around.toml: extends goes in a circle: {circle}"


def test_a_diamond_is_no_circle(start: Path) -> None:
    write(start, a='extends = "tiny.toml"\n', b='extends = "tiny.toml"\n[training]\nsteps = 50\n')
    write(start, c='extends = ["b.toml", "a.toml"]\n')
    config, document = load_config("c.toml"), read_document(Path("c.toml"))
    assert config.training.steps == 50, "tiny.toml lies below b.toml, not again above it"
    assert document.origin(("training", "steps")) == "b.toml"
    assert document.origin(("training", "seq_len")) == "tiny.toml"
    (start / "link.toml").symlink_to("tiny.toml")
    write(start, a='extends = "link.toml"\n[optimizer]\nlr = 0.5\n')
    config = load_config("c.toml")
    assert (config.training.steps, config.optimizer.lr) == (50, 0.5)


def test_what_extends_may_say(start: Path) -> None:
    wanted = "expected the path of a TOML file, relative to this one, or a list of them"
    write(start, a="extends = 3\n", b='extends = ["tiny.toml", 1]\n', c='extends = "tinny.toml"\n')
    assert told("a.toml") == f"a.toml: extends = 3: {wanted}"
    assert told("b.toml") == f'b.toml: extends = ["tiny.toml", 1]: {wanted}'
    said = "tinny.toml: no such file (extended by c.toml); did you mean tiny.toml?"
    assert told("c.toml") == said
    write(start, a='extends = "a\\u0000b.toml"\n')
    said = '"a\\u0000b.toml": a path holds no NUL character (extended by a.toml)'
    assert told("a.toml") == said
    (start / "loop.toml").symlink_to("loop.toml")
    assert told("loop.toml") == "loop.toml: cannot be read: Too many levels of symbolic links"
