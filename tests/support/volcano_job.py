"""What a cluster with Volcano accepts as a job, field by field.

Written from the references of ``batch.volcano.sh/v1alpha1`` and of Kubernetes' pods, as
far as torchx and this project go: an unknown field is an error, and so is a value that
the API server or Volcano's admission would reject.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Label = Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Subdomain = Annotated[
    str, Meta(pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$", max_length=253)
]
EnvName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
PortName = Annotated[str, Meta(pattern=r"^(?=.*[a-z])[a-z0-9-]+$", max_length=15)]
Key = Annotated[str, Meta(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)]
QualifiedName = Annotated[
    str, Meta(pattern=r"^([-.a-z0-9]+/)?[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?$")
]
LabelValue = Annotated[
    str, Meta(pattern=r"^([A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?)?$", max_length=63)
]
Quantity = Annotated[str, Meta(pattern=r"^\d+(\.\d+)?(m|k|[MGTPE]|[KMGTPE]i)?$")]
Path = Annotated[str, Meta(pattern=r"^/[^:]*$")]
Count = Annotated[int, Meta(ge=0)]


class Strict(Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """An object all of whose fields are known."""


class Metadata(Strict):
    name: Subdomain | None = None
    namespace: Label | None = None
    labels: dict[QualifiedName, LabelValue] = {}
    annotations: dict[QualifiedName, str] = {}


class KeyOfSecret(Strict):
    name: Subdomain
    key: Key
    optional: bool = False


class ValueFrom(Strict):
    secret_key_ref: KeyOfSecret


class Variable(Strict):
    name: EnvName
    value: str | None = None
    value_from: ValueFrom | None = None

    def __post_init__(self) -> None:
        require(None in (self.value, self.value_from), f"{self.name} has two values")


class Port(Strict):
    name: PortName
    container_port: Annotated[int, Meta(ge=1, le=65535)]


class Resources(Strict):
    limits: dict[QualifiedName, Quantity] = {}
    requests: dict[QualifiedName, Quantity] = {}


class Mount(Strict):
    name: Label
    mount_path: Path
    read_only: bool = False


class OfContainer(Strict):
    allow_privilege_escalation: bool | None = None
    capabilities: dict[Literal["add", "drop"], list[str]] = {}
    privileged: bool | None = None
    read_only_root_filesystem: bool | None = None


class Container(Strict):
    name: Label
    image: Annotated[str, Meta(min_length=1)]
    command: list[str] = []
    args: list[str] = []
    env: list[Variable] = []
    ports: list[Port] = []
    resources: Resources = Resources()
    volume_mounts: list[Mount] = []
    security_context: OfContainer = OfContainer()

    def __post_init__(self) -> None:
        require_different("volumeMounts", (m.mount_path for m in self.volume_mounts))


class EmptyDir(Strict):
    medium: Literal["", "Memory"] = ""
    size_limit: Quantity | None = None


class Claim(Strict):
    claim_name: Subdomain
    read_only: bool = False


class HostPath(Strict):
    path: Path


class Volume(Strict):
    name: Label
    empty_dir: EmptyDir | None = None
    persistent_volume_claim: Claim | None = None
    host_path: HostPath | None = None

    def __post_init__(self) -> None:
        kinds = (self.empty_dir, self.persistent_volume_claim, self.host_path)
        has_one = sum(kind is not None for kind in kinds) == 1
        require(has_one, f"volume {self.name} must have one kind")


class Toleration(Strict):
    key: QualifiedName | None = None
    operator: Literal["Exists", "Equal"] = "Equal"
    value: LabelValue = ""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = None


class OfPod(Strict):
    run_as_user: Count | None = None
    run_as_group: Count | None = None
    run_as_non_root: bool | None = None
    fs_group: Count | None = None
    fs_group_change_policy: Literal["OnRootMismatch", "Always"] | None = None
    supplemental_groups: list[Count] = []
    seccomp_profile: dict[str, str] = {}
    se_linux_options: dict[str, str] = {}


class NameOfSecret(Strict):
    name: Subdomain


class PodSpec(Strict):
    containers: Annotated[list[Container], Meta(min_length=1)]
    tolerations: list[Toleration] = []
    security_context: OfPod = OfPod()
    image_pull_secrets: list[NameOfSecret] = []
    affinity: dict[str, Any] = {}
    runtime_class_name: Subdomain | None = None
    termination_grace_period_seconds: Count | None = None
    restart_policy: Literal["Always", "OnFailure", "Never"] = "Always"
    volumes: list[Volume] = []
    node_selector: dict[QualifiedName, LabelValue] = {}
    service_account_name: Subdomain | None = None

    def __post_init__(self) -> None:
        names = [volume.name for volume in self.volumes]
        require_different("volumes", names)
        require_different("containers", (one.name for one in self.containers))
        for mount in (m for one in self.containers for m in one.volume_mounts):
            require(mount.name in names, f"volumeMounts: no volume {mount.name}")


class Template(Strict):
    spec: PodSpec
    metadata: Metadata = Metadata()


class Policy(Strict):
    action: Literal["AbortJob", "RestartJob", "TerminateJob", "CompleteJob"]
    event: Literal["*", "PodFailed", "PodEvicted", "TaskCompleted"] | None = None
    exit_code: int | None = None

    def __post_init__(self) -> None:
        has_one = (self.event is None) != (self.exit_code is None)
        require(has_one and self.exit_code != 0, "a policy must have event or exitCode")


class Task(Strict):
    name: Label
    template: Template
    replicas: Count = 1
    min_available: Count | None = None
    max_retry: Count = 3
    policies: list[Policy] = []

    def __post_init__(self) -> None:
        require_different("policies", (policy.event for policy in self.policies))
        require((self.min_available or 0) <= self.replicas, "minAvailable is too large")


class JobSpec(Strict):
    tasks: Annotated[list[Task], Meta(min_length=1)]
    scheduler_name: str = "volcano"
    queue: Subdomain = "default"
    min_available: Count | None = None
    max_retry: Count = 3
    policies: list[Policy] = []
    plugins: dict[Literal["env", "svc", "ssh"], list[str]] = {}
    priority_class_name: Subdomain | None = None

    def __post_init__(self) -> None:
        require_different("tasks", (task.name for task in self.tasks))
        num = sum(task.replicas for task in self.tasks)
        require((self.min_available or 0) <= num, "minAvailable is too large")


class Job(Strict):
    """The whole object."""

    api_version: Literal["batch.volcano.sh/v1alpha1"]
    kind: Literal["Job"]
    metadata: Metadata
    spec: JobSpec

    def __post_init__(self) -> None:
        for task in self.spec.tasks:
            name = self.pod_name(task.name)
            require(len(name) <= 63, f"the name of pod {name} is too long")

    def pod_name(self, task: str, index: int = 0) -> str:
        """Return the name of a pod of a task."""
        return f"{self.metadata.name}-{task}-{index}"


def require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def require_different(what: str, values: Iterable[object]) -> None:
    values = list(values)
    require(len(set(values)) == len(values), f"{what} must be different: {values}")
