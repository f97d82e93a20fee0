"""Whether and how a process pushes its metrics: a section of ``global_config.yml``."""

from typing import Annotated

from msgspec import Meta, Struct

from persia_torchrec import env
from persia_torchrec.parsing.decoding import KeyPath
from persia_torchrec.parsing.yaml_file import parse_file, read_section, read_text

_SECTION = "common_config", "metrics_config"


class MetricsSettings(Struct, frozen=True, kw_only=True):
    """``common_config.metrics_config``."""

    enable_metrics: bool = True  # push them, to the gateway of the environment
    # The value of the label ``job``.
    job_name: Annotated[str, Meta(min_length=1)] = "persia_default_jobname"
    push_interval_seconds: Annotated[int, Meta(ge=1)] = 10


def metrics_settings() -> MetricsSettings:
    """Return the settings of the environment's ``global_config.yml``.

    Where no gateway is named it is not read, and they are the defaults. No other
    section is checked.
    """
    path = env.global_config_path()
    if path is None or env.metrics_gateway() is None:
        return MetricsSettings()
    at = KeyPath(str(path))
    section = parse_file(object, read_text(path), at, "global_config", warns=False)
    for key in _SECTION:
        section = section.get(key) if isinstance(section, dict) else None
        at = at.under(key)
    return read_section(MetricsSettings, section, at)
