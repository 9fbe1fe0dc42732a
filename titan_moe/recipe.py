"""What a recipe is: a typed config, and dotted names of the parts that need torch."""

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from titan_moe.config.model import ModelConfig
from titan_moe.hf_table import HuggingFace


@dataclass(frozen=True)
class FsdpUnit:
    """Modules that FSDP2 gathers together.

    pattern: fnmatch pattern over module names, e.g. "layers.*.moe.experts", or several for modules
        that share weights and are gathered as one.
    mesh: "dense" shards over dp_shard * cp * tp's dense view; "sparse" over the experts' view.
    precision: "policy" follows [training] mixed_precision_*; "float32" never leaves fp32.
    """

    pattern: str | tuple[str, ...]
    mesh: Literal["dense", "sparse"] = "dense"
    precision: Literal["policy", "float32"] = "policy"


@dataclass(frozen=True)
class Sharding:
    """Which weights are split how: data, no logic. Patterns are fnmatch's, over module names.

    fsdp_units: wrapped in the order given.
    colwise: linears that tensor parallelism splits by outputs (heads, inner width); and modules of
        whose own weights each rank has the part of its heads: a norm over all heads together, an
        attention with a number per head.
    rowwise: linears that it splits by inputs, their outputs being summed over ranks. Between
        colwise and rowwise, so anywhere in the parent of a rowwise linear (an attention, an MLP),
        every rank needs all tokens, [B, S, D]. They come in in one of two ways:
    gather_inputs: modules whose first argument is gathered from the ranks' own tokens.
    gather_outputs: linears that each rank applies to its own tokens, and whose outputs are
        gathered: right where they are narrower, as the latents of attention are.
    residual: modules in such a parent that act outside of what is split, on the residual stream
        (a norm after the rowwise linear). The first step finds out if one was forgotten.

    Embedding, output and loss are split by vocabulary, and routed experts by expert, without being
    named; all other weights are whole on every tensor-parallel rank.
    """

    fsdp_units: tuple[FsdpUnit, ...]
    colwise: tuple[str, ...] = ()
    rowwise: tuple[str, ...] = ()
    gather_inputs: tuple[str, ...] = ()
    gather_outputs: tuple[str, ...] = ()
    residual: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """`RECIPE` of a recipe package. Torch-free: the parts below are loaded when they are used.

    config: the recipe's ModelConfig subclass.
    model, sharding: dotted names of the Model class and of a Sharding.
    hf: of a HuggingFace; None: weights neither come from that side nor go there.
    """

    config: type[ModelConfig]
    model: str
    sharding: str
    hf: str | None = None

    def load_model_class(self) -> Any:
        """Import torch and return the Model class."""
        return load_dotted(self.model)

    def load_sharding(self) -> Sharding:
        """Return the Sharding."""
        sharding = load_dotted(self.sharding)
        assert isinstance(sharding, Sharding), f"{self.sharding} is not a Sharding"
        return sharding

    def load_hf(self) -> HuggingFace:
        """Return the HuggingFace.

        Raises:
            ValueError: the recipe has none.
        """
        if self.hf is None:
            raise ValueError(
                f"{self.model}: its RECIPE has no `hf`, the table of Hugging Face's names"
            )
        table = load_dotted(self.hf)
        assert isinstance(table, HuggingFace), f"{self.hf} is not a HuggingFace"
        return table


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Whether a module's name fits one of the patterns: a * stays between two dots."""
    parts = name.split(".")
    return any(
        len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))
        for wanted in (pattern.split(".") for pattern in patterns)
    )


def load_recipe(name: str) -> Recipe:
    """RECIPE of the package that `[model] recipe` names, which a loaded config vouches for."""
    recipe = load_dotted(f"{name}.RECIPE")
    assert isinstance(recipe, Recipe), f"{name}.RECIPE is not a Recipe"
    return recipe


def load_dotted(name: str) -> Any:
    """`package.module.attribute` -> the attribute."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
