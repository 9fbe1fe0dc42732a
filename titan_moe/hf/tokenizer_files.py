"""What AutoTokenizer reads beside the weights."""

import json
import shutil
from pathlib import Path
from typing import Any

from titan_moe.config.sections import Data
from titan_moe.data.tokenizer import BYTE_BOS, BYTE_EOS, BYTE_PAD, Tokenizer

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
# Text that spells one of these out is read as the token, as every tokenizer.json does.
BYTE_SPECIALS = {"<|bos|>": BYTE_BOS, "<|eos|>": BYTE_EOS, "<|pad|>": BYTE_PAD}


def write_tokenizer(data: Data, tokenizer: Tokenizer, folder: Path, *, max_length: int) -> None:
    """Files that make transformers tokenise as training did. Raises OSError."""
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    if data.tokenizer == "byte":
        (folder / TOKENIZER).write_text(byte_tokenizer_json(), encoding="utf-8")
        bos, eos, pad = BYTE_SPECIALS
        settings |= {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    else:
        shutil.copyfile(data.tokenizer, folder / TOKENIZER)
        named = {"bos_token": data.bos_token, "eos_token": data.eos_token}
        settings |= {key: token for key, token in named.items() if token is not None}
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


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
