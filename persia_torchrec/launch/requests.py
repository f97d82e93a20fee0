"""What torchx asks a scheduler for, completed where torchx leaves something out.

Slurm        variables reach a process through ``env``. Those that srun exports lose
against the shell's of the same name, and end at a comma or a quote.
``--cpus-per-task`` is for srun, too: since Slurm 22.05 it does not take
it from the allocation, and binds a task to one processor. Memory is in
MiB, processors are whole.
Kubernetes   variables of Secrets; what ``PodSettings`` has
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchx import specs

from persia_torchrec.errors import ConfigError
from persia_torchrec.launch.arguments import require_known_options
from persia_torchrec.launch.pod import PodSettings

TOKEN_SECRETS = {"PERSIA_JOB_TOKEN": "persia-job-token/token"}
"""Where Kubernetes has the job's token, unless a role names another Secret."""

_ROLE_LABEL = "torchx.pytorch.org/role-name"
_MIB = 2**20
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


@dataclass
class Role(specs.Role):
    """A role that completes by itself what torchx asks a scheduler for."""

    secrets: Mapping[str, str] = field(default_factory=dict)  # by variable
    memory_bytes: int = 0  # 0: what the scheduler gives
    pod: PodSettings = field(default_factory=PodSettings)

    def pre_proc(self, scheduler: str, dryrun_info: Any) -> Any:
        """Change the request to a scheduler; torchx calls it."""
        require_known_options(scheduler)
        if scheduler == "kubernetes":
            for task in dryrun_info.request.resource["spec"]["tasks"]:
                pod = task["template"]
                if pod.metadata.labels[_ROLE_LABEL] == self.name:
                    self._complete_pod(pod)
        elif others := self.secrets.keys() - TOKEN_SECRETS.keys():
            raise ConfigError(
                "secrets must be left out, as only Kubernetes has any. Received: "
                f"{', '.join(sorted(others))}, for {scheduler}. Use env."
            )
        if scheduler == "slurm":
            for name, replica in dryrun_info.request.replicas.items():
                if name.rpartition("-")[0] == self.name:
                    self._complete_step(replica)
        return dryrun_info

    def _complete_step(self, replica: Any) -> None:
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
        container = pod.spec.containers[0]
        if not container.image:
            raise ConfigError(
                "image must be named for Kubernetes, by --image or in the roles file. "
                f"Received: none for the role {self.name}."
            )
        container.command = [_without_escapes(word) for word in container.command]
        for variable in container.env:
            if variable.value is not None:
                variable.value = _without_escapes(variable.value)
        # A token's file is of the launcher's machine.
        replaced = {*self.secrets, *(f"{name}_FILE" for name in self.secrets)}
        container.env = [one for one in container.env if one.name not in replaced]
        for name, secret in self.secrets.items():
            of, _, key = secret.partition("/")
            value = {"secretKeyRef": {"name": of, "key": key}}
            container.env.append({"name": name, "valueFrom": value})
        self.pod.complete(pod)


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


def _without_escapes(text: str) -> str:
    """Return text of which Kubernetes keeps each ``$$``, but that of ``$$(NAME)``."""
    return re.sub(r"\$\$(?!\()", "$$$$", text)
