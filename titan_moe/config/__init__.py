"""One TOML file per run, typed and checked before torch is imported."""

from titan_moe.config.errors import ConfigError
from titan_moe.config.load import load_config
from titan_moe.config.save import save_config
from titan_moe.config.sections import RunConfig

__all__ = ["ConfigError", "RunConfig", "load_config", "save_config"]
