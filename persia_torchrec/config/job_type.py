"""What ``job_type`` asks of a role: to train in a job, or to serve inference.

Train, Eval    all roles meet at the coordinator
Infer          embedding servers and embedding workers, and no coordinator: the
               file says where the servers are
"""

from pathlib import Path

from persia_torchrec.config.global_config import GlobalSettings, load_global_config
from persia_torchrec.errors import ConfigError


def inference_settings(
    path: str | Path | None, *, in_job: bool
) -> GlobalSettings | None:
    """Return the settings of an inference job, or None: the role belongs to another.

    No key is warned of: a server reads the file again, to act on it.

    Args:
        path: of ``global_config.yml``, if there is one.
        in_job: the environment names a job. A file that cannot be read is no error
            then: the role joins first and reads it again, so that the others learn why
            it fails.

    Raises:
        ConfigError: the file cannot be read or has a mistake, and ``in_job`` is False.
    """
    if path is None:
        return None
    try:
        settings = load_global_config(path, warns=False)
    except ConfigError:
        if in_job:
            return None
        raise
    return settings if settings.common.infer is not None else None


def refuse_inference(role: str, path: str | Path | None) -> None:
    """Refuse ``job_type: Infer`` for a role that only a training job has.

    Args:
        role: in words, as ``"data loader"``.
        path: of ``global_config.yml``, if there is one. The role has no other use for
            it, so that a file which is not there, or has a mistake, is no error.

    Raises:
        ConfigError: the file has ``job_type: Infer``.
    """
    if inference_settings(path, in_job=True) is not None:
        raise ConfigError(
            f"A {role} must belong to a job that trains. Received: job_type: Infer in "
            f"{path}. Inference has embedding servers and embedding workers only; for "
            "training, give a global_config.yml with job_type: Train."
        )
