"""What a role's pod has in Kubernetes, under ``pod`` of the roles file.

Names and values are Kubernetes' own. ``securityContext`` is one section of both: what
only containers have, as ``allowPrivilegeEscalation``, goes to the container, all else
to the pod. Other schedulers have no pods, and ignore it, as they do volumes::

    all:
      pod:
        imagePullSecrets: [registry]
        labels: {team: ads}
        nodeSelector: {pool: gpu}
        tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
        securityContext: {runAsUser: 1000, fsGroup: 1000, runAsNonRoot: true}

    --set "trainer.pod.nodeSelector.pool=gpu all.pod.terminationGracePeriodSeconds=300"
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, structs

from persia_torchrec.errors import ConfigError

Count = Annotated[int, Meta(ge=0)]

_CONTAINERS_ONLY = {
    *("allow_privilege_escalation", "capabilities", "privileged"),
    "read_only_root_filesystem",
}
_TMP = "/tmp"
_NAME = r"[A-Za-z0-9]([-._A-Za-z0-9]{0,61}[A-Za-z0-9])?"
_SUBDOMAIN = r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?"
_KEY = re.compile(rf"({_SUBDOMAIN}/)?{_NAME}", re.ASCII)
_VALUE = re.compile(rf"({_NAME})?", re.ASCII)


class _Part(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """A part of a pod, with names in camel case; what is unset is left out."""


class Toleration(_Part, frozen=True, kw_only=True):
    """A taint of nodes that pods may be started on all the same."""

    key: str = ""  # empty, with Exists: every taint
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""
    toleration_seconds: int | None = None

    def __post_init__(self) -> None:
        if self.operator == "Exists" and self.value:
            raise ConfigError(
                "A toleration must have operator: Equal, or no value. Received: Exists "
                f"and {self.value!r}."
            )
        if self.operator == "Equal" and not self.key:
            raise ConfigError(
                "A toleration must have a key, or operator: Exists for every taint. "
                "Received: neither."
            )


class Capabilities(_Part, frozen=True, kw_only=True):
    """Capabilities of the container's processes."""

    add: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()


class SecurityContext(_Part, frozen=True, kw_only=True):
    """Whom the processes run as, and what they may do."""

    run_as_user: Count | None = None
    run_as_group: Count | None = None
    run_as_non_root: bool | None = None
    fs_group: Count | None = None  # of volumes, as of one that checkpoints go to
    fs_group_change_policy: Literal["OnRootMismatch", "Always"] | None = None
    supplemental_groups: tuple[Count, ...] = ()
    seccomp_profile: dict[str, str] = {}
    se_linux_options: dict[str, str] = {}
    app_armor_profile: dict[str, str] = {}
    # Of the container:
    allow_privilege_escalation: bool | None = None
    capabilities: Capabilities | None = None
    privileged: bool | None = None
    read_only_root_filesystem: bool | None = None


class PodSettings(_Part, frozen=True, kw_only=True):
    """The section; each field is as in a pod's ``spec``, or in its ``metadata``."""

    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    node_selector: dict[str, str] = {}
    tolerations: tuple[Toleration, ...] = ()
    image_pull_secrets: tuple[str, ...] = ()  # names
    security_context: SecurityContext = SecurityContext()
    affinity: dict[str, Any] = {}
    runtime_class_name: str | None = None
    termination_grace_period_seconds: Count | None = None

    def __post_init__(self) -> None:
        for name in ("labels", "annotations", "node_selector"):
            for key, value in getattr(self, name).items():
                is_value = name == "annotations" or _VALUE.fullmatch(value)
                if not (_KEY.fullmatch(key) and is_value):
                    raise ConfigError(
                        f"{name} must have names as example.com/name, and values of at "
                        "most 63 letters, digits, -, _ and dots. Received: "
                        f"{key!r}: {value!r}."
                    )
        for name in self.image_pull_secrets:
            if re.fullmatch(_SUBDOMAIN, name) is None:
                raise ConfigError(
                    "imagePullSecrets must be names of Secrets, of lower case letters, "
                    f"digits, - and dots. Received: {name!r}."
                )

    def over(self, other: "PodSettings") -> "PodSettings":
        """Return the settings of both; lists add up, of others these replace."""
        both: PodSettings = _over(self, other)
        return both

    def complete(self, pod: Any) -> None:
        """Add the settings to a pod, as torchx makes it."""
        metadata, spec, container = pod.metadata, pod.spec, pod.spec.containers[0]
        if taken := sorted(self.labels.keys() & metadata.labels.keys()):
            raise ConfigError(
                "labels must not be those by which torchx finds its jobs. Received: "
                f"{', '.join(taken)}."
            )
        metadata.labels.update(self.labels)
        metadata.annotations.update(self.annotations)
        spec.node_selector.update(self.node_selector)
        spec.tolerations = _plain(self.tolerations) or None
        secrets = [{"name": name} for name in self.image_pull_secrets]
        spec.image_pull_secrets = secrets or None
        spec.affinity = self.affinity or None
        spec.runtime_class_name = self.runtime_class_name
        seconds = self.termination_grace_period_seconds
        spec.termination_grace_period_seconds = seconds
        of_pod, of_container = self.security_context, {}
        for name in _CONTAINERS_ONLY:
            of_container[name] = getattr(of_pod, name)
        others = dict.fromkeys(_CONTAINERS_ONLY)
        spec.security_context = _plain(structs.replace(of_pod, **others)) or None
        container.security_context = _plain(SecurityContext(**of_container))
        if of_pod.read_only_root_filesystem:
            _mount_tmp(spec, container)


def _over(above: Any, below: Any) -> Any:
    """Return a struct with the fields of both."""
    merged = {}
    for name in above.__struct_fields__:
        one, other = getattr(above, name), getattr(below, name)
        if isinstance(one, Struct) and other is not None:
            merged[name] = _over(one, other)
        elif isinstance(one, Mapping):
            merged[name] = {**other, **one}
        elif isinstance(one, tuple):
            merged[name] = (*other, *one)
        else:
            merged[name] = other if one is None else one
    return structs.replace(above, **merged)


def _plain(value: object) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))  # with lists for tuples


def _mount_tmp(spec: Any, container: Any) -> None:
    """Mount a folder that can be written to where torchrun and numba keep files."""
    if any(mount.mount_path.rstrip("/") == _TMP for mount in container.volume_mounts):
        return
    spec.volumes.append({"name": "tmp", "emptyDir": {}})
    container.volume_mounts.append({"name": "tmp", "mountPath": _TMP})
