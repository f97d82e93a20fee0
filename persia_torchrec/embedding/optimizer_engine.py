"""What applies gradients on a server, by name."""

from typing import Literal, get_args

from persia_torchrec.errors import ConfigError

OptimizerEngine = Literal["compiled", "fbgemm"]
"""What applies gradients: compiled loops, or fbgemm's CPU kernels."""
EARLIER_ENGINE = "auto"
"""What settings of earlier versions say for ``compiled``."""


def require_engine(engine: str) -> str:
    """Return the name of an engine, also the earlier one, or raise ConfigError."""
    if engine in (*get_args(OptimizerEngine), EARLIER_ENGINE):
        return engine
    raise ConfigError(
        f"optimizer_engine must be one of {', '.join(get_args(OptimizerEngine))}. "
        f"Received: {engine!r}."
    )
