"""Requests of torchx to schedulers, completed where torchx leaves something out.

Slurm        variables reach a process through ``env``. Those that srun exports lose
against the shell's of the same name, and end at a comma or a quote.
``--cpus-per-task`` is for srun, too: since Slurm 22.05 it does not take
it from the allocation, and binds a task to one processor. Memory is in
MiB, processors are whole.
Kubernetes   variables of Secrets; what ``pods.py`` has of the roles file
"""

import itertools
import math
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from torchx import specs
from torchx.specs.finder import ComponentValidationException

from persia_torchrec.env import LOGS, RUN_DIR, RUNS
from persia_torchrec.errors import ConfigError, has_password
from persia_torchrec.launch import pods

_LEAST_MEMORY = 64 * 1024**2

_UNITS = {
    "m": Fraction(1, 1000),
    "": Fraction(1),
    **{unit: Fraction(1000**n) for n, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": Fraction(1024**n) for n, unit in enumerate("KMGTPE", 1)},
}


def quantity(amount: float | str) -> Fraction:
    """Return what Kubernetes means by an amount, as 0.5, "500m" or "64Gi"."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)([A-Za-z]{0,2})", str(amount))
    if match is None or match[2] not in _UNITS:
        raise ConfigError(
            "cpu and memory must be numbers, with one of Kubernetes' units or none, "
            "for example 500m or 64Gi"
            f". Received: {amount!r}."
        )
    return Fraction(match[1]) * _UNITS[match[2]]


def require_processors(amount: float | str) -> None:
    """Reject what is no number of processors, as 8Gi."""
    if str(amount)[-1] not in "0123456789m" or quantity(amount) < Fraction(1, 1000):
        raise ConfigError(
            "cpu must be a number of processors, for example 8 or 500m (half of one), "
            "at least 1m"
            f". Received: {amount!r}."
        )


def require_memory(amount: int | str) -> None:
    """Reject less memory than a process needs to start, as of a forgotten unit."""
    num_bytes = quantity(amount)
    if num_bytes < _LEAST_MEMORY:
        number = str(amount).rstrip("kmMGTPEi")
        raise ConfigError(
            f"memory must be at least 64Mi. Received: {amount!r}, which is "
            f"{float(num_bytes):g} bytes. Write {number}Gi or {number}Mi."
        )


class ComponentError(ConfigError, ComponentValidationException):
    """A ConfigError that torchx shows in a line, without a traceback."""


TOKEN_SECRETS = {"PERSIA_JOB_TOKEN": "persia-job-token/token"}
"""Where Kubernetes has the job's token, unless a role names another Secret."""

_CONTAINERS = {"local_docker": "Docker", "kubernetes": "Kubernetes"}
_ROLE_LABEL = "torchx.pytorch.org/role-name"
_MIB = 2**20
_NO_SECRETS = (
    "Export such a variable in the shell of torchx run, which roles get, or name a "
    "file of mode 600 instead, as AWS_SHARED_CREDENTIALS_FILE does."
)
_SECRET_NAME = re.compile(
    r"_PWD$|(^|_)(SECRET|PASSWORD|PASSWD|PASSPHRASE|TOKEN|CREDENTIALS?|CONNECTION_STRING"
    r"|(API|ACCESS|SECRET|PRIVATE|ACCOUNT|SAS|AUTH|ENCRYPTION)_?KEY)_?\d*$",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


@dataclass
class Role(specs.Role):
    """A role that completes by itself what torchx asks a scheduler for."""

    secrets: Mapping[str, str] = field(default_factory=dict)  # by variable
    memory_bytes: int = 0  # 0: what the scheduler gives
    pod: Mapping[str, Any] = field(default_factory=dict)

    @property
    def image(self) -> str:
        """Container image; an error where a scheduler that needs one asks for none.

        torchx asks when the scheduler is known: Docker's, to add the working directory.
        """
        scheduler = self.env.get("TORCHX_JOB_ID", "").partition("://")[0]
        image: str = self.__dict__["image"]
        if not image and scheduler in _CONTAINERS:
            raise ComponentError(
                f"image must be named for {_CONTAINERS[scheduler]}, by --image or in "
                f"the roles file. Received: none for the role {self.name}. To start it "
                "on this machine, without containers: torchx run -s local_cwd"
            )
        return image

    @image.setter
    def image(self, image: str) -> None:
        self.__dict__["image"] = image

    def pre_proc(self, scheduler: str, dryrun_info: Any) -> Any:
        """Change the request to a scheduler; torchx calls it."""
        if scheduler == "local":
            self._keep_logs(dryrun_info.request)
        if scheduler == "kubernetes":
            for task in dryrun_info.request.resource["spec"]["tasks"]:
                task["template"] = pod = _plain(task["template"])
                if pod["metadata"]["labels"][_ROLE_LABEL] == self.name:
                    self._complete_pod(pod)
        elif others := self.secrets.keys() - TOKEN_SECRETS.keys():
            raise ConfigError(
                "secrets must be left out: only Kubernetes supports them. Received: "
                f"{', '.join(sorted(others))}, for {scheduler}. {_NO_SECRETS}"
            )
        if scheduler == "slurm":
            for name, replica in dryrun_info.request.replicas.items():
                if name.rpartition("-")[0] == self.name:
                    self._complete_step(replica)
        return dryrun_info

    def _keep_logs(self, request: Any) -> None:
        """Have logs in the folder of the job, where torchx would remove them."""
        folders = request.role_log_dirs[self.name]
        was = Path(folders[0]).parents[1]
        base = was.parents[1]
        is_removed = base.parent == Path(tempfile.gettempdir())
        if not (is_removed and base.name.startswith("torchx_")):  # one that -cfg names
            return
        if request.log_dir == str(was):  # in the first role
            request.log_dir = str(self._own_logs(request.app_id))

        def moved(path: str) -> str:
            return path.replace(str(was), request.log_dir, 1)

        request.role_log_dirs[self.name] = [moved(folder) for folder in folders]
        for one in request.role_params[self.name]:
            one.env = {name: moved(value) for name, value in one.env.items()}
            one.stdout, one.stderr = moved(one.stdout), moved(one.stderr)
            one.combined = moved(one.combined)

    def _own_logs(self, job_id: str) -> Path:
        """Return the folder of logs of a job: of a later start by its number."""
        jobs = self.env.get("PERSIA_CHECKPOINT_DIR") or RUNS
        given = [*(self.env.get(name, "") for name in RUN_DIR), f"{jobs}/{job_id}"]
        local = (path for path in given if path and "://" not in path)
        logs = Path.cwd() / next(local, f"{RUNS}/{job_id}") / LOGS
        numbers = (logs / str(number) for number in itertools.count(2))
        later = (folder for folder in numbers if not folder.exists())
        return next(later) if logs.exists() else logs

    def _complete_step(self, replica: Any) -> None:
        _require_no_secrets(replica.env)
        words = [f"{name}={value}" for name, value in replica.env.items()]
        replica.args = [*words, replica.entrypoint, *replica.args]
        replica.entrypoint, replica.env = "env", {}
        replica.srun_opts["export"] = "ALL"  # as torchx where there are variables
        if self.resource.cpu > 0:
            cpus = str(math.ceil(self.resource.cpu))
            for options in (replica.sbatch_opts, replica.srun_opts):
                options["cpus-per-task"] = cpus
        if "mem" in replica.sbatch_opts:
            replica.sbatch_opts["mem"] = str(math.ceil(self.memory_bytes / _MIB))

    def _complete_pod(self, pod: Any) -> None:
        container = pod["spec"]["containers"][0]
        container["command"] = [_without_escapes(w) for w in container["command"]]
        for variable in container["env"]:
            if "value" in variable:
                variable["value"] = _without_escapes(variable["value"])
        # A token's file is of the launcher's machine.
        replaced = {*self.secrets, *(f"{name}_FILE" for name in self.secrets)}
        kept = [one for one in container["env"] if one["name"] not in replaced]
        container["env"] = kept
        for name, secret in self.secrets.items():
            of, _, key = secret.partition("/")
            value = {"secretKeyRef": {"name": of, "key": key}}
            kept.append({"name": name, "valueFrom": value})
        pods.complete(pod, self.pod, f"{self.name}.pod")


def _plain(pod: Any) -> Any:
    """Return a pod as Kubernetes reads it, of torchx's."""
    from torchx.schedulers.kubernetes_scheduler import (  # needs the extra kubernetes
        sanitize_for_serialization,
    )

    return sanitize_for_serialization(pod)


def as_it_is(text: str) -> str:
    """Return text of which torchx, that replaces macros, makes this one again."""
    return text.replace("$$", "$$$$")


def as_they_are(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables whose values are :func:`as_it_is`."""
    return {name: as_it_is(value) for name, value in variables.items()}


def require_names(variables: Mapping[str, str]) -> None:
    """Reject a name that a shell, or Kubernetes, does not take for a variable's."""
    for name in variables:
        if _VARIABLE.fullmatch(name) is None:
            raise ConfigError(
                "Variables must have names of letters, digits and _, and no digit first"
                f". Received: {name!r}."
            )


def _require_no_secrets(variables: Mapping[str, str]) -> None:
    """Reject variables that look like secrets where all are on command lines."""
    found = [
        name
        for name, value in variables.items()
        if value and (_SECRET_NAME.search(name) or has_password(value))
    ]
    if found:
        raise ConfigError(
            "env must hold no secret on Slurm, where variables are on command lines, "
            "which all users of a node can read. Received: "
            f"{', '.join(sorted(found))}. {_NO_SECRETS}"
        )


def _without_escapes(text: str) -> str:
    """Return text of which Kubernetes keeps each ``$$``, but that of ``$$(NAME)``."""
    return re.sub(r"\$\$(?!\()", "$$$$", text)
