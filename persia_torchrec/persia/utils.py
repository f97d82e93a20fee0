"""Small helpers for the user's scripts, under PERSIA's names.

``persia_torchrec.utils`` and ``persia_torchrec.service`` are the doors to them.
"""

import random
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from persia_torchrec import env
from persia_torchrec.env import MAX_PORT, PERSIA_LAUNCHER_VERBOSE, set_variable
from persia_torchrec.errors import ConfigError
from persia_torchrec.parsing.yaml_file import parse_yaml, read_text
from persia_torchrec.rpc.addresses import free_port_from

is_cuda_feature_available = torch.backends.cuda.is_built  # under PERSIA's name

MAX_SEED = 2**32 - 1  # of NumPy's global generator
MAXIMUM_LOCAL_PORT_NUM = MAX_PORT  # under PERSIA's name


def setup_seed(seed: int) -> None:
    """Make a run repeatable by a seed in ``[0, 2**32 - 1]``.

    Seeds Python's ``random``, NumPy's global generator and torch on all devices, and
    makes torch reject operations that have no deterministic form. Call it before the
    first CUDA operation: cuBLAS reads its workspace setting only once.
    """
    if not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"seed must be in [0, {MAX_SEED}]. Received: {seed}.")
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # the user's script may draw from it
    torch.manual_seed(seed)
    set_variable("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Else all unfilled memory is filled with NaN first, buffers of every copy included.
    deterministic: Any = torch.utils.deterministic  # a module with a property
    deterministic.fill_uninitialized_memory = False


def load_yaml(filepath: str | Path) -> object:
    """Read a YAML file into plain values; a duplicate key is an error."""
    return parse_yaml(read_text(filepath), filepath)


def dump_yaml(content: object, filepath: str | Path) -> None:
    """Write plain values to a YAML file, keys in their order; replaces the file.

    If ``content`` holds something that YAML has no plain form for, the file stays.
    """
    try:
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    except yaml.YAMLError as exc:
        raise ConfigError(
            "content must be made of dicts, lists, strings, numbers, booleans and "
            f"None. Received: {exc}."
        ) from exc
    Path(filepath).write_text(text, encoding="utf-8")


def run_command(cmd: Sequence[object], env: Mapping[str, str] | None = None) -> None:
    """Run a program and wait for its end; CalledProcessError unless it ends well.

    ``PERSIA_LAUNCHER_VERBOSE=1`` shows the command. ``env`` is the program's whole
    environment; None: that of this process.
    """
    words = [str(word) for word in cmd]
    if PERSIA_LAUNCHER_VERBOSE:
        sys.stderr.write(f"execute command: {shlex.join(words)}\n")
    subprocess.run(words, env=env, check=True)


def resolve_binary_execute_path(binary_name: str) -> str:
    """Return the path of a program that is installed beside this Python."""
    path = Path(sysconfig.get_path("scripts"), binary_name)
    if not path.is_file():
        raise ConfigError(
            "binary_name must be a program installed beside this Python, for example "
            "persia-launcher. "
            f"Received: {binary_name!r}, and no {path}. What PERSIA's native programs "
            "do is done by commands of persia-launcher."
        )
    return str(path)


def find_free_port(port: int = 10000, interval: int = 1) -> int:
    """Return the first of ``port``, ``port + interval``, ... that is free just now.

    Another process may take it before the caller does. It raises ConfigError unless
    ``port`` is in ``[1, 65535]``, ``interval`` at least 1, and such a port free.
    """
    return free_port_from(port, interval)


def get_embedding_worker_services() -> list[str]:
    """Return the addresses of the embedding workers, for ``InferCtx``.

    They are what ``EMBEDDING_WORKER_SERVICE`` says, with commas between them; when it
    is unset, ``embedding_worker:8887``: the name of the service in PERSIA's files.
    """
    text = env.text("EMBEDDING_WORKER_SERVICE") or "embedding_worker:8887"
    addresses = [part.strip() for part in text.split(",")]
    if not all(addresses):
        raise ConfigError(
            "EMBEDDING_WORKER_SERVICE must list addresses as host:port, with commas "
            f"between them. Received: {text!r}."
        )
    return addresses
