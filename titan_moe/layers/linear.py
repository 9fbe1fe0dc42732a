"""Linear and embedding weights that say how they are initialised, and do not do it themselves."""

from torch import nn

from titan_moe.layers.init import Constant, Init, Normal


class Linear(nn.Linear):
    """`x @ weight.T`, and `+ bias` if it has one. weight: [out_features, in_features]."""

    inits: dict[str, Init]

    def __init__(
        self, in_features: int, out_features: int, *, std: float, bias: bool = False
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.inits = {"weight": Normal(std)}
        if bias:
            self.inits["bias"] = Constant(0.0)

    def reset_parameters(self) -> None:
        """Called by torch's constructor. Does nothing: `inits` is the truth."""


class Embedding(nn.Embedding):
    """Rows of a table by token id. weight: [vocab_size, hidden_size]."""

    inits: dict[str, Init]

    def __init__(self, vocab_size: int, hidden_size: int, *, std: float) -> None:
        super().__init__(vocab_size, hidden_size)
        self.inits = {"weight": Normal(std)}

    def reset_parameters(self) -> None:
        """Called by torch's constructor. Does nothing: `inits` is the truth."""
