"""`titan-moe generate`: what a run has learned, by the same numbers as everywhere else.

S tokens, V vocabulary.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.train.runs import train_here, write_recipe
from titan_moe.check.pool import Pool
from titan_moe.cli.main import main
from titan_moe.config.model import ModelConfig
from titan_moe.data.tokenizer import ByteTokenizer
from titan_moe.generate import Speaker, generate, next_logits, open_checkpoint, open_hf_folder
from titan_moe.hf.export import export

PROMPT, TOKENS = "w1 w2 w", 12


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, pool: Pool) -> Path:
    """The folder of a run trained on two ranks, each with half of the experts."""
    recipe = write_recipe(tmp_path_factory.mktemp("generate"))
    layout = ["--parallelism.expert_parallel_degree=2", "--validation.enable=false"]
    pool.run(2, train_here, recipe, "--training.steps=8", *layout)
    return recipe.parent / "runs" / "run"


def naive_next(model: Any, ids: list[int]) -> list[int]:
    """The likeliest token after each of `ids`, from one forward over all of them."""
    tokens_BS = torch.tensor([ids])
    with torch.no_grad():
        hidden_BSD = model(
            tokens_BS,
            positions_BS=torch.arange(len(ids))[None],
            document_ids_BS=torch.zeros_like(tokens_BS),
            tokens_BS=tokens_BS,
        )
        logits_BSV = model.head.output(model.head.norm(hidden_BSD))
    return logits_BSV[0, :, : ByteTokenizer.vocab_size].argmax(dim=1).tolist()


def test_greedy_is_the_argmax_of_the_models_own_logits(run: Path) -> None:
    speaker = open_checkpoint(run)
    made = list(generate(speaker, PROMPT, tokens=TOKENS))
    prompt = [256, *PROMPT.encode()]
    assert naive_next(speaker.model, prompt + made)[len(prompt) - 1 : -1] == made
    assert len(made) == TOKENS
    older = open_checkpoint(run / "checkpoint" / "step-4")
    newest = open_checkpoint(run / "checkpoint" / "step-8")
    assert torch.equal(next_logits(newest.model, prompt), next_logits(speaker.model, prompt))
    assert not torch.equal(next_logits(older.model, prompt), next_logits(speaker.model, prompt))


def test_transformers_generates_the_same_from_the_export(run: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    export(run / "checkpoint" / "step-8", tmp_path / "hf", dtype="float32")
    speaker = open_checkpoint(run)
    made = list(generate(speaker, PROMPT, tokens=TOKENS))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    prompt = torch.tensor([[256, *PROMPT.encode()]])
    out = theirs.generate(prompt, max_new_tokens=TOKENS, do_sample=False)
    assert out[0, prompt.shape[1] :].tolist() == made
    back = open_hf_folder(tmp_path / "hf", "recipes.deepseek_v3")
    assert back.tokenizer.encode("def é") == list("def é".encode())
    prompt_ids = prompt[0].tolist()
    assert torch.equal(next_logits(back.model, prompt_ids), next_logits(speaker.model, prompt_ids))


class Fixed(nn.Module):
    """Always the same logits."""

    def __init__(self, logits_V: Tensor) -> None:
        super().__init__()
        self.logits_V = logits_V

    @property
    def head(self) -> "Fixed":
        return self

    def forward(self, x: Tensor, **keywords: Tensor) -> Tensor:
        return torch.zeros(*x.shape, 1)

    def logits(self, hidden_BSD: Tensor) -> Tensor:
        return self.logits_V.expand(*hidden_BSD.shape[:2], -1)


def speaker_of(likely: dict[int, float], longest: int = 8) -> Speaker:
    logits_V = torch.full((264,), -torch.inf)
    for token, weight in likely.items():
        logits_V[token] = weight
    cfg = ModelConfig.model_construct(max_seq_len=longest)
    return Speaker(Fixed(logits_V), cfg, ByteTokenizer(), starts_with_bos=True)


def test_temperature_draws_by_softmax_and_a_seed_repeats() -> None:
    """exp(2/2) to 1: token 65 comes 73.1% of the time; 4000 draws deviate by 0.7%."""
    speaker = speaker_of({65: 2.0, 66: 0.0}, longest=4002)
    draws = list(generate(speaker, "x", tokens=4000, temperature=2.0, seed=3))
    assert len(draws) == 4000
    assert abs(draws.count(65) / 4000 - 0.731) < 0.025
    again = list(generate(speaker, "x", tokens=50, temperature=2.0, seed=3))
    other = list(generate(speaker, "x", tokens=50, temperature=2.0, seed=4))
    assert again == draws[:50] != other
    assert set(generate(speaker, "x", tokens=5)) == {65}


def test_it_ends_at_eos_and_where_positions_end_and_never_says_padding() -> None:
    assert list(generate(speaker_of({257: 9.0, 65: 1.0}), "x", tokens=5)) == []
    assert list(generate(speaker_of({65: 1.0}), "abc", tokens=9)) == [65] * 4  # BOS and 3 of 8
    assert list(generate(speaker_of({263: 9.0, 65: 1.0}), "x", tokens=1)) == [65]
    with pytest.raises(ValueError, match=r"9 tokens are more than model\.max_seq_len = 8"):
        list(generate(speaker_of({65: 1.0}), "abcdefgh", tokens=1))


def test_the_command(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(run), "--prompt", PROMPT, "--tokens=3"]) == 0
    assert capsys.readouterr().out.startswith(PROMPT)
    for arguments, said in (
        ([str(run)], "expected --prompt TEXT"),
        (["--prompt", "x"], "expected one checkpoint folder"),
        ([str(run), "--prompt=x", "--tokens=0"], "--tokens = 0: expected integer >= 1"),
        ([str(run), "--prompt=x", "--temperature=-1"], "expected a number >= 0"),
        ([str(run), "--prompt=x", "--speed=1"], "unknown option --speed=1"),
        ([str(run / "nowhere"), "--prompt=x"], "no such checkpoint folder"),
        ([str(run), "--prompt=" + "x" * 65], "66 tokens are more than model.max_seq_len = 64"),
        ([str(run), "--prompt=x", "--recipe=recipes.mixtral"], "not a Hugging Face folder"),
        ([str(run), "--prompt=x", "--recipe=recipes.mixtrall"], "did you mean"),
    ):
        assert main(["generate", *arguments]) == 2
        assert said in capsys.readouterr().err
