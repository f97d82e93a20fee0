"""``persia-k8s-utils``: PERSIA's command line for Kubernetes, and the way from there.

    persia-k8s-utils convert job.yml --output roles.yml

reads a PersiaJob, writes what each role asks for to ``roles.yml``, and prints the
command that starts the same job: ``torchx run -s kubernetes ...``. What is not carried
over is named, with the reason. PERSIA's own commands say what there is in their place.
"""

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from msgspec import Meta, Struct, structs

from persia_torchrec import env
from persia_torchrec.errors import ConfigError, PersiaError
from persia_torchrec.launch import roles
from persia_torchrec.launch.schedulers import quantity
from persia_torchrec.parsing.decoding import KeyPath
from persia_torchrec.parsing.settings import SETTINGS
from persia_torchrec.parsing.yaml_file import (
    parse_documents,
    read_section,
    read_text,
)

PORT = 29400  # of the address book: each pod has an IP address of its own
NO_NATS = "There is no NATS: roles meet at the coordinator, which torchx starts too."
CPU_IMAGE, CUDA_IMAGE = "persia-torchrec:cpu", "persia-torchrec:cuda"

INSTEAD = {
    "gencrd": "There is no custom resource but Volcano's Job, which stands for all "
    "roles: install Volcano, and turn PersiaJobs into commands by `convert`.",
    "operator": "Volcano starts the pods of a job, and the job's coordinator ends it: "
    "install Volcano, and start a job by `torchx run -s kubernetes`.",
    "server": "torchx asks the cluster itself: `torchx run -s kubernetes` for /apply, "
    "`torchx cancel` for /delete, `torchx list -s kubernetes` for /listjobs, `torchx "
    "status` and `torchx log` for /listpods and /podstatus.",
}
"""PERSIA's commands, and what to use in their place."""


EARLIER_NAMES = {
    "global_config_path": "global_config",
    "globalConfigPath": "global_config",
    "embedding_config_path": "embedding_config",
    "embeddingConfigPath": "embedding_config",
    "nn_worker_py_entry_path": "nn_worker",
    "nnWorkerPyEntryPath": "nn_worker",
    "data_loader_py_entry_path": "data_loader",
    "dataLoaderPyEntryPath": "data_loader",
}
"""Fields of ``spec`` in earlier versions of PERSIA, now variables of ``persiaEnv``."""


class Variable(Struct, frozen=True, kw_only=True, rename="camel"):
    """One of the environment: text, as Kubernetes wants it."""

    name: str
    value: str | None = None
    value_from: dict[str, Any] | None = None


class Block(Struct, frozen=True, kw_only=True, rename="camel"):
    """One role of a PersiaJob."""

    replicas: roles.Count
    resources: dict[str, dict[str, Any] | None] | None = None
    volume_mounts: list[dict[str, Any]] | None = None
    env: list[Variable] | None = None
    image: str | None = None


class NNWorkerBlock(Block, frozen=True, kw_only=True, rename="camel"):
    """``nnWorker``: pods with several processes each."""

    nproc_per_node: Annotated[int, Meta(ge=1)]


def _variable(setting: str) -> str:
    """Return the variable of the environment that has a setting."""
    return SETTINGS[setting].variable


class PersiaEnv(Struct, frozen=True, kw_only=True, rename=_variable):
    """``persiaEnv``: paths where the roles run, by the variables of settings."""

    nn_worker: str | None = None
    data_loader: str | None = None
    embedding_config: str
    global_config: str


class Spec(Struct, frozen=True, kw_only=True, rename="camel"):
    """``spec``: all fields of PERSIA's custom resource."""

    persia_env: PersiaEnv
    enable_metrics: bool | None = None
    volumes: list[dict[str, Any]] | None = None
    env: list[Variable] | None = None
    log_level: str | None = None
    embedding_parameter_server: Block | None = None
    embedding_worker: Block | None = None
    nn_worker: NNWorkerBlock | None = None
    dataloader: Block | None = None
    restart_policy: str | None = None
    image_pull_policy: str | None = None


class PersiaJob(Struct, frozen=True, kw_only=True, rename="camel"):
    """The whole document."""

    api_version: str
    kind: str
    metadata: dict[str, Any]
    spec: Spec


def main(argv: Sequence[str] | None = None) -> None:
    """Convert a PersiaJob, or exit with what to use in the place of a command."""
    given = parser().parse_args(argv)
    try:
        if given.command in INSTEAD:
            raise ConfigError(f"{given.command} is not here. {INSTEAD[given.command]}")
        converted, output = Converted(given.file), Path(given.output)
        if output.exists():
            raise ConfigError(f"--output must be a new file. Received: {output}.")
        output.write_text(yaml.safe_dump(converted.roles, sort_keys=False))
    except PersiaError as exc:
        raise SystemExit(f"persia-k8s-utils: {exc}") from exc
    for path, reason in converted.left.items():
        sys.stderr.write(f"not carried over: {path}: {reason}\n")
    sys.stdout.write(converted.command(given.output) + "\n")


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    about = "Take jobs of PERSIA's to Kubernetes."
    parser = argparse.ArgumentParser("persia-k8s-utils", description=about)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    convert = commands.add_parser(
        "convert", help="turn a PersiaJob into a command of torchx and a file of roles"
    )
    convert.add_argument("file", help="YAML with one PersiaJob")
    convert.add_argument(
        "--output", default="roles.yml", help="the file of roles [roles.yml]"
    )
    for name in INSTEAD:
        instead = commands.add_parser(name, help="say what to use in its place")
        instead.add_argument("--output", help=argparse.SUPPRESS)  # PERSIA's flags
        instead.add_argument("--port", help=argparse.SUPPRESS)
    return parser


class Converted:
    """A PersiaJob in torchx's terms.

    Attributes:
        flags: of the component, each with its value.
        roles: the content of the file of roles.
        left: what is not carried over, by path, and why.
    """

    def __init__(self, path: str) -> None:
        self.roles: dict[str, dict[str, Any]] = {}
        self.left: dict[str, str] = {}
        job = self._find_job(path)
        self._path, spec, files = path, job.spec, job.spec.persia_env
        self._namespace = str(job.metadata.get("namespace", "default"))
        for key in sorted(job.metadata.keys() - {"namespace"}):
            self.left[f"metadata.{key}"] = "torchx names and labels a job itself."
        self._claims = self._read_volumes(spec.volumes or [])
        self._reserved = roles.JobSettings(
            embedding_config=files.embedding_config,
            global_config=files.global_config,
            port=PORT,
        ).variables(1)
        self._add_all(spec)
        num_of = {
            role: self._add(role, name, block)
            for role, name, block in (
                ("server", "embeddingParameterServer", spec.embedding_parameter_server),
                ("worker", "embeddingWorker", spec.embedding_worker),
                ("loader", "dataloader", spec.dataloader),
                ("trainer", "nnWorker", spec.nn_worker),
            )
        }
        assert spec.nn_worker is not None
        num_of["trainer"] *= spec.nn_worker.nproc_per_node
        given = structs.asdict(files)
        given["nn_worker"] = self._script("nn_worker", files)
        given["data_loader"] = (
            self._script("data_loader", files) if num_of["loader"] else ""
        )
        image = self.roles["server"]["image"]
        for role in self.roles.values():
            if role.get("image") == image:
                del role["image"]
        self.roles = {name: role for name, role in self.roles.items() if role}
        read_section(roles.RolesFile, self.roles, KeyPath(path))
        self.flags = {
            **given,
            **{roles.NUMBER_OF[role]: num for role, num in num_of.items()},
            "nproc_per_node": spec.nn_worker.nproc_per_node,
            "image": image,
        }

    def command(self, roles_file: str) -> str:
        """Return the command line, each flag of the component in a line."""
        cfg = shlex.quote(f"queue=default,namespace={self._namespace}")
        flags = {**self.flags, "port": PORT, "roles_file": roles_file}
        lines = [
            f"torchx run -s kubernetes -cfg {cfg} --workspace ''",
            "persia.train",
            *(f"--{name} {shlex.quote(str(value))}" for name, value in flags.items()),
        ]
        return " \\\n    ".join(lines)

    def _find_job(self, path: str) -> PersiaJob:
        jobs = []
        for document in parse_documents(read_text(path), path):
            given: Any = document
            kind = given.get("kind") if isinstance(given, dict) else given
            if kind == "PersiaJob":
                self._rename(given.get("spec"))
                jobs.append(read_section(PersiaJob, given, KeyPath(path)))
            elif kind == "NatsCluster":
                self.left[kind] = NO_NATS
            elif kind is not None:
                self.left[str(kind)] = "It is no part of the job: use kubectl."
        if len(jobs) != 1:
            raise ConfigError(
                f"{path} must have one document with kind: PersiaJob. "
                f"Received: {len(jobs)}."
            )
        return jobs[0]

    def _rename(self, spec: Any) -> None:
        """Give the fields of earlier versions of PERSIA their present names."""
        if not isinstance(spec, dict):
            return
        for name in EARLIER_NAMES.keys() & spec.keys():
            files = spec.setdefault("persiaEnv", {})
            if isinstance(files, dict):
                files.setdefault(_variable(EARLIER_NAMES[name]), spec.pop(name))
        for block in spec.values():
            mounts = block.get("volumeMounts") if isinstance(block, dict) else None
            for mount in mounts or ():
                if isinstance(mount, dict) and "read_only" in mount:
                    mount.setdefault("readOnly", mount.pop("read_only"))

    def _script(self, setting: str, files: PersiaEnv) -> str:
        script: str | None = getattr(files, setting)
        if not script:
            at = f"{self._path}: spec.persiaEnv.{_variable(setting)}"
            raise ConfigError(f"{at} must name a script. Received: none.")
        return shlex.quote(script)  # the component splits it into words

    def _read_volumes(self, volumes: list[dict[str, Any]]) -> dict[str, str]:
        """Return claims and paths of hosts, by the names of their volumes."""
        found = {}
        for volume in volumes:
            name = str(volume.get("name"))
            match volume:
                case {"persistentVolumeClaim": {"claimName": str(claim), **rest}}:
                    found[name] = f"{claim}:ro" if rest.get("readOnly") else claim
                case {"hostPath": {"path": str(path)}}:
                    found[name] = path
                case _:
                    self.left[f"spec.volumes.{name}"] = (
                        "torchx mounts claims and paths of the host only. /dev/shm is "
                        "memory, without a limit, in each pod."
                    )
        return found

    def _add_all(self, spec: Spec) -> None:
        """Carry over what all roles have in common."""
        section = self._read_env("spec", spec.env)
        if spec.log_level is not None:
            with env.set_within({"LOG_LEVEL": spec.log_level}):
                try:
                    level = env.log_level()
                    section.setdefault("env", {}).setdefault("LOG_LEVEL", level)
                except ConfigError as exc:
                    self.left["spec.logLevel"] = str(exc)
        self.roles["all"] = section
        if spec.enable_metrics is not False:
            self.left["spec.enableMetrics"] = (
                "No metrics gateway is started. Start one, as examples/metrics does, "
                "and set all.env.PERSIA_METRICS_GATEWAY_ADDR to its address."
            )
        if spec.restart_policy not in (None, "Never"):
            self.left["spec.restartPolicy"] = (
                "What is killed in a pod is started again there, and the whole job "
                "when a pod is lost (--restarts, --max_retries)."
            )
        if spec.image_pull_policy is not None:
            self.left["spec.imagePullPolicy"] = (
                "It is Kubernetes' default: Always for the tag latest, else "
                "IfNotPresent."
            )

    def _add(self, role: str, name: str, block: Block | None) -> int:
        """Carry over the block of one role; return its number of processes."""
        path = f"spec.{name}"
        if block is None or not block.replicas:
            if role == "loader":
                return 0
            raise ConfigError(
                f"{self._path}: {path} must have replicas, for a job that trains. "
                "Received: none. For one that serves use persia.serve."
            )
        section = self._read_resources(path, block)
        volumes = self._read_mounts(path, block.volume_mounts or [])
        section |= self._read_env(path, block.env)
        image = block.image
        if image is None or image.startswith("persiaml/"):
            own = CUDA_IMAGE if section.get("gpus") else CPU_IMAGE
            self.left[f"{path}.image"] = (
                f"{image or 'The image of PERSIA'} does not have this package. {own} "
                "is what components/Dockerfile makes."
            )
            image = own
        if volumes:
            section["volumes"] = volumes
        self.roles[role] = {**section, "image": image}
        return block.replicas

    def _read_resources(self, path: str, block: Block) -> dict[str, Any]:
        given = {key: value or {} for key, value in (block.resources or {}).items()}
        requests = given.pop("requests", {})
        limits = {**requests, **given.pop("limits", {})}
        for key in given:
            self.left[f"{path}.resources.{key}"] = "torchx has no such setting."
        if requests:
            self.left[f"{path}.resources.requests"] = (
                "torchx requests the limits, less 0.1 processors and 1024 MB. Where "
                "there was no limit, the request is the limit."
            )
        section: dict[str, Any] = {}
        for key, amount in limits.items():
            if key == "nvidia.com/gpu":
                section["gpus"] = math.ceil(quantity(amount))
            elif key in ("cpu", "memory"):
                section[key] = amount
            else:
                self.left[f"{path}.resources.{key}"] = "torchx has no such setting."
        return section

    def _read_mounts(self, path: str, mounts: list[dict[str, Any]]) -> list[str]:
        volumes = []
        for mount in mounts:
            name, to = str(mount.get("name")), mount.get("mountPath")
            at = f"{path}.volumeMounts.{name}"
            others = sorted(mount.keys() - {"name", "mountPath", "readOnly"})
            if name not in self._claims:
                self.left[at] = "Its volume is not carried over."
            elif others:
                self.left[at] = f"torchx has no setting for {', '.join(others)}."
            else:
                source, _, mode = self._claims[name].partition(":")
                is_read_only = mode or mount.get("readOnly")
                volumes.append(f"{source}:{to}{':ro' if is_read_only else ''}")
        return volumes

    def _read_env(self, path: str, entries: list[Variable] | None) -> dict[str, Any]:
        """Return the variables of a section, by value and of Secrets."""
        section: dict[str, dict[str, str]] = {}
        for entry in entries or []:
            name, value = entry.name, entry.value or ""
            at = f"{path}.env.{name}"
            if name == "PERSIA_NATS_URL":
                self.left[at] = NO_NATS
            elif name in env.REJECTED:
                self.left[at] = env.REJECTED[name][1]
            elif name in self._reserved:
                self.left[at] = "The job sets it itself."
            elif entry.value_from is not None:
                match entry.value_from:
                    case {"secretKeyRef": {"name": str(secret), "key": str(key)}}:
                        section.setdefault("secrets", {})[name] = f"{secret}/{key}"
                    case _:
                        self.left[at] = "Only values and keys of Secrets are."
            else:
                section.setdefault("env", {})[name] = value
        return section


if __name__ == "__main__":
    main()
