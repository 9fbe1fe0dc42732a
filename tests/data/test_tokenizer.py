"""Tokenizers add nothing of their own; BOS and EOS are what the settings say."""

import json
import pickle
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from tests.data.corpora import make_config, make_documents, source, write_jsonl
from titan_moe.config.sections import Data
from titan_moe.data import build_train_loader, build_validation, tokenizer_of
from titan_moe.data.tokenizer import DocumentEncoder

TEXT = "naïve Ωmega 四\n\x00tail"


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer.json whose post-processor adds tokens, and which truncates and pads."""
    backend = Tokenizer(models.BPE(unk_token=None))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(make_documents(50), trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    backend.enable_truncation(5)
    backend.enable_padding(length=64)
    path = folder / "tokenizer.json"
    backend.save(str(path))
    return path


def section(**keys: Any) -> Data:
    defaults = {"add_bos": False, "add_eos": False, "num_streams": 1, "sources": [source("x")]}
    return Data(**{**defaults, **keys})


def test_bytes() -> None:
    tokenizer = tokenizer_of(section())
    assert tokenizer.encode(TEXT) == list(TEXT.encode("utf-8"))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (259, 256, 257)
    assert tokenizer.decode([256, *TEXT.encode(), 257, 258]) == TEXT
    assert tokenizer.decode([0xFF]) == "\ufffd"


def test_json(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path)
    tokenizer = tokenizer_of(section(tokenizer=str(path), bos_token="<s>", eos_token="</s>"))
    reference = Tokenizer.from_file(str(path))
    reference.no_truncation()
    text = " ".join(make_documents(5))
    ids = tokenizer.encode(text)
    # The reference with its post-processor on pads to 64 and adds one token at each end.
    with_extras = reference.encode(text).ids
    assert with_extras[0] == 0
    assert with_extras[-1] == 1
    assert ids == with_extras[1:-1]
    assert len(ids) > 64
    assert tokenizer.encode("") == []
    # As it reaches another process.
    assert pickle.loads(pickle.dumps(tokenizer)).encode(text) == ids
    assert tokenizer.vocab_size == len(json.loads(path.read_text())["model"]["vocab"])
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)


@pytest.mark.parametrize("text", ["", "x", "fünf six", " fünf", "naïve", "四"])
def test_what_the_first_token_spells(text: str, tmp_path: Path) -> None:
    """A byte-level token has a character for each byte that it stands for."""
    assert tokenizer_of(section()).first_token_bytes(text) == len(text.encode()[:1])
    path = write_tokenizer(tmp_path)
    tokens = Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False).tokens
    num_bytes = len(tokens[0]) if text else 0
    whole = text.encode()[:num_bytes].decode(errors="ignore")  # without a part of a character
    found = tokenizer_of(section(tokenizer=str(path))).first_token_bytes(text)
    assert found == len(whole.encode())


@pytest.mark.parametrize("eos_token", ["<s>", "</s>"])
def test_four_combinations(eos_token: str, tmp_path: Path) -> None:
    """Also where BOS and EOS are one token: neither swallows the other."""
    data = section(tokenizer=str(write_tokenizer(tmp_path)), bos_token="<s>", eos_token=eos_token)
    tokenizer = tokenizer_of(data)
    body = tokenizer.encode(TEXT)
    for add_bos, add_eos in product([False, True], repeat=2):
        encode = DocumentEncoder(tokenizer, add_bos=add_bos, add_eos=add_eos)
        bos, eos = [0] * add_bos, [0 if eos_token == "<s>" else 1] * add_eos
        assert encode(TEXT).tolist() == [*bos, *body, *eos]
        assert encode("").tolist() == [*bos, *eos]
        assert encode(TEXT).dtype == np.uint16


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tokenizer": "nowhere.json"}, "data.tokenizer: nowhere.json is not a file"),
        ({"tokenizer": "bad.json"}, "data.tokenizer: bad.json is no tokenizer.json"),
        ({"bos_token": "<s>"}, "data.bos_token: the byte tokenizer has its own"),
        ({"tokenizer": "tokenizer.json", "add_bos": True}, "data.add_bos needs data.bos_token"),
        ({"tokenizer": "tokenizer.json", "add_eos": True}, "data.add_eos needs data.eos_token"),
        (
            {"tokenizer": "tokenizer.json", "add_eos": True, "eos_token": "<eos>"},
            "data.eos_token: '<eos>' is not in the vocabulary of tokenizer.json",
        ),
    ],
)
def test_refusals(
    keys: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=message):
        tokenizer_of(section(**keys))


def test_vocabulary_must_fit_the_model(tmp_path: Path) -> None:
    config = make_config(source(write_jsonl(tmp_path, ["a"])), vocab_size=258, sets=[])
    for build in (build_train_loader, build_validation):
        with pytest.raises(ValueError, match=r"model.vocab_size is 258, .* must be at least 259"):
            build(config, 0, 1)


def test_json_tokens_reach_the_batches(tmp_path: Path) -> None:
    """And another tokenizer with the same sizes is refused on resume."""
    path = write_tokenizer(tmp_path)
    documents = make_documents(7)
    config = make_config(
        source(write_jsonl(tmp_path, documents)),
        num_streams=1,
        global_batch_size=1,
        seq_len=64,
        vocab_size=400,
        tokenizer=str(path),
        bos_token="<s>",
        eos_token="</s>",
    )
    loader = build_train_loader(config, 0, 1)
    tokenizer = tokenizer_of(config.data)
    stream = [t for text in documents for t in [0, *tokenizer.encode(text), 1]]
    assert next(loader)["tokens"].flatten().tolist() == stream[:64]
    path.write_text(path.read_text() + " ")
    with pytest.raises(ValueError, match=r"tokenizer is sha256:.* in the checkpoint"):
        build_train_loader(config, 0, 1, loader.state())
