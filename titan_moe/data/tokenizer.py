"""Text to token ids and back: raw bytes, or any Hugging Face tokenizer.json."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from titan_moe.config.sections import Data

BYTE_BOS, BYTE_EOS, BYTE_PAD = 256, 257, 258


class Tokenizer(ABC):
    """What the data path asks of a tokenizer.

    identity: changes whenever the same text may give other tokens; kept in checkpoints.
    vocab_size: one more than the largest id.
    bos_id, eos_id: None where the settings name no such token.
    """

    identity: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None

    @abstractmethod
    def encode_array(self, text: str) -> np.ndarray:
        """Token ids of `text`, [T], of any integer type. Adds no BOS, EOS or the like."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Adds no BOS, EOS or the like."""
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    @abstractmethod
    def first_token_bytes(self, text: str) -> int:
        """UTF-8 bytes of `text` that its first token spells. A character that several tokens
        of a tokenizer.json share counts as the last one's."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, without special tokens; broken UTF-8 becomes U+FFFD."""


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte, and three more: BOS, EOS, padding."""

    identity = "byte"
    vocab_size = BYTE_PAD + 1
    bos_id = BYTE_BOS
    eos_id = BYTE_EOS

    def encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def first_token_bytes(self, text: str) -> int:
        return min(len(text), 1)  # a byte is a token here, whatever character it belongs to

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < BYTE_BOS).decode("utf-8", errors="replace")


class JsonTokenizer(Tokenizer):
    """A `tokenizer.json`. What its post-processor, truncation or padding would add or cut is off.

    Raises ValueError if the file is missing or unreadable, or does not know a token named to it.
    """

    def __init__(self, path: str, bos_token: str | None, eos_token: str | None) -> None:
        from tokenizers import Tokenizer as Backend  # slow to import, and not needed for bytes

        file = Path(path)
        if not file.is_file():
            raise ValueError(
                f"data.tokenizer: {path} is not a file; give 'byte' or the path of a tokenizer.json"
            )
        content = file.read_bytes()
        try:
            self._backend: Any = Backend.from_buffer(content)
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"data.tokenizer: {path} is no tokenizer.json: {error}") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self.identity = f"sha256:{hashlib.sha256(content).hexdigest()[:32]}"
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.bos_id = self._id_of("bos_token", bos_token, path)
        self.eos_id = self._id_of("eos_token", eos_token, path)

    def _id_of(self, key: str, token: str | None, path: str) -> int | None:
        if token is None:
            return None
        found: int | None = self._backend.token_to_id(token)
        if found is None:
            raise ValueError(f"data.{key}: {token!r} is not in the vocabulary of {path}")
        return found

    def encode_array(self, text: str) -> np.ndarray:
        # The "fast" variant leaves out offsets, which would cost many times the memory of the ids.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int32)

    def first_token_bytes(self, text: str) -> int:
        spans = self._backend.encode(text, add_special_tokens=False).offsets[:2]
        # The second token begins inside the first one's span where they share a character.
        ends = [end for _, end in spans[:1]] + [begin for begin, _ in spans[1:]]
        return len(text[: min(ends, default=0)].encode("utf-8"))

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text


def tokenizer_of(section: Data) -> Tokenizer:
    """The tokenizer that `[data]` names.

    Raises ValueError for a missing file, an unknown token, or BOS or EOS asked for but not named.
    """
    if section.tokenizer == "byte":
        for key in ("bos_token", "eos_token"):
            if getattr(section, key) is not None:
                raise ValueError(f"data.{key}: the byte tokenizer has its own; leave the key out")
        return ByteTokenizer()
    for flag, key in (("add_bos", "bos_token"), ("add_eos", "eos_token")):
        if getattr(section, flag) and getattr(section, key) is None:
            raise ValueError(f"data.{flag} needs data.{key}: the name of the token to add")
    return JsonTokenizer(section.tokenizer, section.bos_token, section.eos_token)


def check_vocabulary(tokenizer: Tokenizer, model_vocab_size: int) -> None:
    """Raises ValueError if the model's embedding has no row for some token."""
    if tokenizer.vocab_size > model_vocab_size:
        raise ValueError(
            f"model.vocab_size is {model_vocab_size}, but the tokenizer has ids up to "
            f"{tokenizer.vocab_size - 1}; model.vocab_size must be at least {tokenizer.vocab_size}"
        )


class DocumentEncoder:
    """A document's text to all its tokens, BOS and EOS included, in the smallest type they fit."""

    def __init__(self, tokenizer: Tokenizer, *, add_bos: bool, add_eos: bool) -> None:
        self._tokenizer = tokenizer
        self._add_bos = add_bos
        self._dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32
        self._before = self._special(tokenizer.bos_id, add_bos)
        self._after = self._special(tokenizer.eos_id, add_eos)

    def _special(self, token_id: int | None, wanted: bool) -> np.ndarray:
        assert token_id is not None or not wanted, "tokenizer_of refuses this"
        return np.array([token_id] if wanted else [], dtype=self._dtype)

    def __call__(self, text: str) -> np.ndarray:
        body = self._tokenizer.encode_array(text).astype(self._dtype, copy=False)
        return np.concatenate([self._before, body, self._after])

    def first_token_bytes(self, text: str) -> int:
        """UTF-8 bytes of `text` that a document's first token spells; BOS spells none."""
        return 0 if self._add_bos else self._tokenizer.first_token_bytes(text)
