"""The same weights in transformers' implementation: logits, gradients, and files both ways.

B batch, S sequence, V vocabulary.
"""

import logging
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from titan_moe.check.errors import gradient_errors
from titan_moe.check.report import UncheckedError, WrongError, few, worst
from titan_moe.check.subject import Subject, logits_of
from titan_moe.check.tolerances import FP32_LOGITS, FP32_MODEL_GRADIENT
from titan_moe.checkpoint.state import MODEL, model_tensors
from titan_moe.hf.export import export_model
from titan_moe.hf.load import load_weights
from titan_moe.hf.names import Names, names_of
from titan_moe.parallel.initialise import initialise

# Loading without a process group is a plain case here, not one to warn of.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")

HOW_TO_GET = "pip install 'titan-moe[dev]' brings it"


@dataclass
class Pair:
    """Our stirred model, and theirs loaded from its export, both in eval mode."""

    ours: Any
    theirs: Any
    names: Names
    folder: Path


def logits_equal(subject: Subject) -> str:
    """Of two whole rows, whose tokens visit most experts."""
    with _pair(subject) as pair, torch.no_grad():
        batch = subject.plain_batch
        got_BSV = logits_of(pair.ours, batch)
        wanted_BSV = pair.theirs(batch["tokens"], use_cache=False).logits
        largest = (got_BSV - wanted_BSV).abs().max().item()
        if not largest <= FP32_LOGITS:
            at = (got_BSV - wanted_BSV).abs().amax(dim=(0, 2)).gt(FP32_LOGITS).nonzero()[0].item()
            hint = (
                "from a row's first position on: weights, norms, router or experts"
                if at == 0
                else f"from position {at} of a row on: what comes before is right, so that it is "
                "rotary positions, the mask or a window"
            )
            raise WrongError(
                f"logits differ by up to {largest:.1e} > {FP32_LOGITS:.0e}, {hint}",
                f"{subject.file('model.py')} against {_their_file(pair.theirs)}; and "
                f"{subject.file('hf.py')} if a row of it swaps two weights of one shape. If it is "
                f"meant to be another model than theirs, take `hf=` out of "
                f"{subject.file('__init__.py')}",
            )
        deviation = wanted_BSV.std().item()
        return f"largest difference {largest:.1e}, of logits that vary by {deviation:.1f}"


def gradients_equal(subject: Subject) -> str:
    """Of the summed cross-entropy, tensor by tensor of the file."""
    with _pair(subject) as pair:
        batch = subject.plain_batch
        ours = pair.ours
        torch.nn.functional.cross_entropy(
            logits_of(ours, batch).flatten(0, 1), batch["labels"].flatten(), reduction="sum"
        ).backward()
        logits_BSV = pair.theirs(batch["tokens"], use_cache=False).logits
        torch.nn.functional.cross_entropy(
            logits_BSV.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
        ).backward()
        got = _in_their_names(pair)
        wanted = {name: grad for name, grad in _their_gradients(pair).items() if name in got}
        if missing := sorted(got.keys() - wanted.keys()):
            raise WrongError(
                f"tensors that only we have a gradient for: {few(missing)}",
                subject.file("hf.py"),
            )
        errors = gradient_errors(got, wanted)
        name, error = worst(errors)
        if not error <= FP32_MODEL_GRADIENT:
            wrong = sorted(errors, key=lambda key: -errors[key])
            wrong = [key for key in wrong if not errors[key] <= FP32_MODEL_GRADIENT]
            raise WrongError(
                f"{len(wrong)} of {len(errors)} gradients are off, by {error:.1e} > "
                f"{FP32_MODEL_GRADIENT:.0e} at most: {few(wrong)}",
                f"{subject.file('model.py')}: what lies between these weights and the loss",
            )
        return f"of {len(errors)} tensors, the worst {name} by {error:.1e}"


def round_trip(subject: Subject) -> str:
    """Export and import give every bit back, and the files' names are transformers' own."""
    with _pair(subject) as pair:
        back = subject.build()
        initialise(back, subject.seed)
        load_weights([back], pair.folder, subject.recipe, subject.model_config)
        sent, returned = model_tensors([pair.ours]), model_tensors([back])
        unlike = [
            name.removeprefix(MODEL)
            for name, tensor in sent.items()
            if not torch.equal(tensor, returned[name]) or tensor.dtype != returned[name].dtype
        ]
        if unlike:
            raise WrongError(
                f"not the same bits after export and import: {few(unlike)}", subject.file("hf.py")
            )
        own = {name for name, _ in _tensors_in(pair.folder)}
        with tempfile.TemporaryDirectory() as folder:
            pair.theirs.save_pretrained(folder)
            theirs = {name for name, _ in _tensors_in(Path(folder))}
        only_ours = {name for name in own - theirs if not _is_ahead(name, subject)}
        if differing := sorted(only_ours | (theirs - own)):
            raise WrongError(
                f"names that only one of us and transformers writes: {few(differing)}",
                subject.file("hf.py"),
            )
        return f"{len(sent)} tensors of ours, {len(own)} of theirs"


@contextmanager
def _pair(subject: Subject) -> Iterator[Pair]:
    """Export our model and load it as theirs; no key may be missing, unexpected or unlike."""
    if subject.recipe.hf is None:
        raise UncheckedError("the recipe has no `hf`, the table of Hugging Face's names")
    if find_spec("transformers") is None:
        raise UncheckedError(f"transformers is not installed: {HOW_TO_GET}")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as their_logging

    their_logging.set_verbosity_error()
    their_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    ours = subject.stirred().eval()
    with tempfile.TemporaryDirectory() as folder:
        try:
            names = names_of(subject.recipe, subject.model_config)
            export_model(ours, subject.recipe, subject.model_config, Path(folder))
        except ValueError as error:
            raise WrongError(f"export: {error}", f"the rows of {subject.file('hf.py')}") from error
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
        theirs, report = loaded
        # Some families' embeddings have no gradient for a token that they name padding. Which one
        # that is says a tokenizer, not the architecture, and here every token is a word.
        theirs.get_input_embeddings().padding_idx = None
        report["unexpected_keys"] = {
            name for name in report["unexpected_keys"] if not _is_ahead(name, subject)
        }
        kinds = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
        if wrong := {kind: sorted(map(str, report[kind])) for kind in kinds if report.get(kind)}:
            said = "; ".join(f"{kind}: {few(keys)}" for kind, keys in wrong.items())
            raise WrongError(f"transformers, loading the export: {said}", subject.file("hf.py"))
        yield Pair(ours, theirs.eval(), names, Path(folder))


def _in_their_names(pair: Pair) -> dict[str, Tensor]:
    """Our gradients as the recipe's table would write them."""
    parameters = dict(pair.ours.named_parameters())
    written: dict[str, Tensor] = {}
    for name, parts in pair.names.parts.items():
        gradient = parameters[name].grad if name in parameters else None
        if gradient is None:
            continue  # a buffer, or a layer that only training further ahead uses
        for part in parts:
            if part.theirs not in written:
                written[part.theirs] = torch.full(pair.names.theirs[part.theirs], torch.nan)
            part.in_theirs(written[part.theirs]).copy_(part.in_ours(gradient))
    return written


def _their_gradients(pair: Pair) -> dict[str, Tensor]:
    """By the names of the file: transformers itself brings them there, as it would the weights."""
    state = dict(pair.theirs.state_dict())
    for name, parameter in pair.theirs.named_parameters():
        gradient = parameter.grad
        state[name] = torch.zeros_like(parameter) if gradient is None else gradient
    with tempfile.TemporaryDirectory() as folder:
        pair.theirs.save_pretrained(folder, state_dict=state)
        return dict(_tensors_in(Path(folder)))


def _tensors_in(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                yield name, tensors.get_tensor(name)


def _is_ahead(name: str, subject: Subject) -> bool:
    """Whether theirs is of a layer of multi-token prediction, which transformers does not build.

    Of such layers it expects none but those of the published depths.
    """
    blocks, ahead = subject.model_config.num_layers, subject.model_config.mtp_depth()
    number = re.search(r"\blayers\.(\d+)\.", name)
    return number is not None and blocks <= int(number[1]) < blocks + ahead


def _their_file(theirs: Any) -> str:
    return f"{type(theirs).__module__} ({type(theirs).__name__})"
