"""Text from a checkpoint, to look at what a run has learned: one process, one token at a time.

There is no cache of keys and values: each token is a forward over all before it.

S tokens so far, V vocabulary.
"""

import logging
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titan_moe.checkpoint import folder as disk
from titan_moe.checkpoint.checkpointer import Checkpointer
from titan_moe.config.model import ModelConfig
from titan_moe.config.recipe_config import model_config_of
from titan_moe.config.sections import Checkpoint
from titan_moe.data.tokenizer import JsonTokenizer, Tokenizer, check_vocabulary
from titan_moe.hf.config_json import model_config
from titan_moe.hf.folder import CONFIG, open_folder, read_json
from titan_moe.hf.load import load_weights
from titan_moe.hf.names import names_of
from titan_moe.hf.tokenizer_files import saved_tokenizer
from titan_moe.parallel.initialise import initialise, materialise
from titan_moe.parallel.whole import keywords_of
from titan_moe.recipe import load_recipe

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoint"  # in a run folder, unless [checkpoint] folder says otherwise


@dataclass(frozen=True)
class Speaker:
    """A model and its tokenizer. starts_with_bos: as documents did in training."""

    model: Any
    cfg: ModelConfig
    tokenizer: Tokenizer
    starts_with_bos: bool


def open_checkpoint(path: Path, moved_to: str | None = None) -> Speaker:
    """From a step-N folder of ours, or the newest complete one of a run folder, in any layout.

    moved_to: where its tokenizer.json is now, if not where it was.

    Raises:
        ValueError: neither of these, a checkpoint that is damaged or of another model than its own
            config says, or a tokenizer.json that is not there or not the run's.
    """
    step = _step_in(path)
    state = disk.read_train_state(step)
    keys = state["config"]["model"]
    cfg = model_config_of(keys["recipe"]).model_validate(keys)
    data, tokenizer = saved_tokenizer(state, step, moved_to)
    model = _built(cfg)
    Checkpointer(
        step.parent, Checkpoint(), [model], torch.optim.AdamW(model.parameters())
    ).load_weights(step)
    return _speaker(model, cfg, tokenizer, data.add_bos)


def open_hf_folder(path: Path, recipe: str) -> Speaker:
    """From a Hugging Face folder, whose tensors recipe `recipe` knows by name.

    Layers of multi-token prediction, which the next token does not need, are not read, be they
    there or not.

    Raises:
        ValueError: not such a folder, not of this recipe, or without tokenizer.json.
    """
    try:
        model_config_of(recipe)
    except ValueError as error:
        raise ValueError(f"--recipe = {recipe}: {error}") from error
    parts = load_recipe(recipe)
    content = open_folder(path)
    cfg = model_config(parts, recipe, content.config, str(path / CONFIG))
    if cfg.mtp_depth():
        logger.info("%s: read without its layers of multi-token prediction", path)
        cfg = cfg.model_copy(update={"num_mtp_layers": 0})
    model = _built(cfg, names_of(parts, cfg).parts)
    load_weights([model], path, parts, cfg)
    tokens = _special_tokens(path)
    tokenizer = JsonTokenizer(str(path / "tokenizer.json"), tokens["bos"], tokens["eos"])
    settings = _settings(path)
    return _speaker(model, cfg, tokenizer, bool(settings.get("add_bos_token", False)))


def generate(
    speaker: Speaker,
    prompt: str,
    *,
    tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[int]:
    """Ids after the prompt's, at most `tokens` of them; ends before EOS and at max_seq_len.

    temperature: 0 takes the likeliest token; else tokens are drawn by softmax(logits /
        temperature), the same ones for the same seed.

    Raises:
        ValueError: a prompt without a token, or longer than model.max_seq_len.
    """
    bos, known = speaker.tokenizer.bos_id, speaker.tokenizer.vocab_size
    ids = speaker.tokenizer.encode(prompt)
    if speaker.starts_with_bos and bos is not None:
        ids = [bos, *ids]
    if not ids:
        raise ValueError('--prompt = "": no token to begin with, as the tokenizer has no BOS here')
    longest = speaker.cfg.max_seq_len
    if len(ids) > longest:
        raise ValueError(
            f"--prompt: its {len(ids)} tokens are more than model.max_seq_len = {longest}"
        )
    generator = torch.Generator().manual_seed(seed)
    for _ in range(min(tokens, longest - len(ids))):
        # Rows of padding in the embedding are no tokens: nobody could read them.
        logits_V = next_logits(speaker.model, ids)[:known]
        ids.append(_chosen(logits_V, temperature, generator))
        if ids[-1] == speaker.tokenizer.eos_id:
            return
        yield ids[-1]


@torch.no_grad()
def next_logits(model: Any, ids: list[int]) -> Tensor:
    """logits_V of the token after `ids`, fp32."""
    tokens_BS = torch.tensor([ids])
    batch = {
        "tokens": tokens_BS,
        "positions": torch.arange(len(ids))[None],
        "document_ids": torch.zeros_like(tokens_BS),
    }
    hidden_BSD = model(tokens_BS, **keywords_of(batch))
    logits_V: Tensor = model.head.logits(hidden_BSD[:, -1:])[0, 0].float()
    return logits_V


def _chosen(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0.0:
        return int(logits_V.argmax())
    weights_V = (logits_V / temperature).softmax(dim=0)
    return int(torch.multinomial(weights_V, 1, generator=generator))


def _built(cfg: ModelConfig, loaded: Container[str] | None = None) -> Any:
    """The whole model in fp32; what is `loaded` (absent: all weights) has no values yet."""
    with torch.device("meta"):
        model: nn.Module = load_recipe(cfg.recipe).load_model_class()(
            cfg, layers=range(cfg.num_layers), has_embedding=True, has_head=True
        )
    materialise(model, torch.device("cpu"))
    weights = {name for name, _ in model.named_parameters()}
    initialise(model, seed=0, loaded=weights if loaded is None else loaded)
    return model


def _speaker(model: Any, cfg: ModelConfig, tokenizer: Tokenizer, bos: bool) -> Speaker:
    check_vocabulary(tokenizer, cfg.vocab_size)
    return Speaker(model.eval(), cfg, tokenizer, bos)


def _step_in(path: Path) -> Path:
    """A step-N folder as it is; of a run folder, or of its checkpoints', the newest complete."""
    if (path / disk.MARKER).is_file():
        return path
    for folder in (path / CHECKPOINTS, path):
        if steps := disk.committed_steps(folder):
            return disk.step_folder(folder, steps[-1])
    disk.check_committed(path)  # tells what is wrong with it
    raise AssertionError(path)


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, where there is one."""
    file = folder / "tokenizer_config.json"
    return read_json(file, folder) if file.is_file() else {}


def _special_tokens(folder: Path) -> dict[str, str | None]:
    """Names of BOS and EOS: a string, or an object with that string as its content."""
    settings = _settings(folder)
    named = {which: settings.get(f"{which}_token") for which in ("bos", "eos")}
    return {
        which: token.get("content") if isinstance(token, dict) else token
        for which, token in named.items()
    }
