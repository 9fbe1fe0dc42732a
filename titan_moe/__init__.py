"""titan-moe: pre-train Mixture-of-Experts language models, one TOML file per run."""

__version__ = "0.1.0"
