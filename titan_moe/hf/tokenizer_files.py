"""What AutoTokenizer reads beside the weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titan_moe.config.sections import Data
from titan_moe.data.tokenizer import BYTE_BOS, BYTE_EOS, BYTE_PAD, Tokenizer, tokenizer_of

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
# Text that spells one of these out is read as the token, as every tokenizer.json does.
BYTE_SPECIALS = {"<|bos|>": BYTE_BOS, "<|eos|>": BYTE_EOS, "<|pad|>": BYTE_PAD}


def saved_tokenizer(
    state: Mapping[str, Any], checkpoint: Path, moved_to: str | None = None
) -> tuple[Data, Tokenizer]:
    """`[data]` and tokenizer of a run, by its train_state.json.

    moved_to: where its tokenizer.json is now, if not where it was.

    Raises:
        ValueError: no such file, or one that is not what the run was trained with.
    """
    data = Data.model_validate(state["config"]["data"])
    if moved_to is not None:
        if data.tokenizer == "byte":
            raise ValueError(f"--tokenizer = {moved_to}: {checkpoint} is of bytes, without a file")
        data = data.model_copy(update={"tokenizer": moved_to})
    if data.tokenizer != "byte" and not Path(data.tokenizer).is_file():
        raise ValueError(
            f"{data.tokenizer}: no such file, and {checkpoint} was trained with it; say where it "
            "is now by --tokenizer PATH"
        )
    tokenizer = tokenizer_of(data)
    # Imported weights have read no data.
    identity = state.get("data", {}).get("identity", {}).get("tokenizer", tokenizer.identity)
    if tokenizer.identity != identity:
        raise ValueError(
            f"{data.tokenizer} is {tokenizer.identity}, but {checkpoint} was trained with "
            f"{identity}; say where that one is by --tokenizer PATH"
        )
    return data, tokenizer


def write_tokenizer(data: Data, tokenizer: Tokenizer, folder: Path, *, max_length: int) -> None:
    """Files that make transformers tokenise a prompt as `generate` does: as documents of training
    began, with BOS where data.add_bos says so. EOS is never added, since a prompt goes on. Raises
    OSError.
    """
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": data.add_bos,
        "add_eos_token": False,
    }
    if data.tokenizer == "byte":
        text = byte_tokenizer_json()
        names = dict(zip(("bos_token", "eos_token", "pad_token"), BYTE_SPECIALS, strict=True))
    else:
        text = Path(data.tokenizer).read_text(encoding="utf-8")
        named = {"bos_token": data.bos_token, "eos_token": data.eos_token}
        names = {key: token for key, token in named.items() if token is not None}
    # What training switches off is not there; BOS comes from here, whoever reads the file.
    before = _before(names["bos_token"], tokenizer.bos_id) if data.add_bos else None
    content = json.loads(text) | {"truncation": None, "padding": None, "post_processor": before}
    (folder / TOKENIZER).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / SETTINGS).write_text(json.dumps(settings | names, indent=2) + "\n", encoding="utf-8")


def _before(token: str, token_id: int | None) -> dict[str, Any]:
    """The post-processor that puts one token before each text."""
    special: dict[str, Any] = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [special, first],
        "pair": [special, first, special, second],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def byte_tokenizer_json() -> str:
    """The byte tokenizer as a tokenizer.json: a vocabulary of bytes, and no merges."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in BYTE_SPECIALS])
    assert {token: backend.token_to_id(token) for token in BYTE_SPECIALS} == BYTE_SPECIALS
    text: str = backend.to_str(pretty=True)
    return text


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: itself where it is a
    printable one, else the next of those from U+0100 on."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte if byte in shown else 0x100 + hidden.index(byte)) for byte in range(256)]
