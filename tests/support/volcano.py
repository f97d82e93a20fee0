"""A stand-in for a cluster with Volcano, whose pods are processes of this machine.

It has the part of Kubernetes' API that torchx uses: submit, status, list, log and
delete a job. What becomes of the job follows Volcano's reference:

    all pods of a job start together; a pod is not started again (restartPolicy: Never)
    a pod fails or is evicted     the policy of its task for that event, or nothing.
                                  RestartJob ends all pods, and starts all again. The
                                  job has failed when that was done maxRetry times
    all pods have ended           Completed if all have succeeded, else Failed
    the job is deleted            its pods get SIGTERM, and SIGKILL after their grace

A container's image is this environment; its command must be ``python -m MODULE ...``. A
volume is a link at its path. Variables are those of the pod, with those of Secrets, and
those by which Volcano's plugins ``env`` and ``svc`` tell pods of each other.
"""

import contextlib
import json
import math
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

import msgspec

from tests.support.forked_jobs import run_module
from tests.support.hosts import Host, run_on
from tests.support.processes import Processes, Running, kill_all
from tests.support.volcano_job import Container, Job, Task

QUEUE, NAMESPACE, TOKEN = "default", "ml", "of-the-user"
GRACE_S = 30.0  # terminationGracePeriodSeconds
_TICK_S = 0.02
_JOBS = r"/apis/batch\.volcano\.sh/v1alpha1/namespaces/(?P<namespace>[^/?]+)/jobs"
_LOG = r"/api/v1/namespaces/(?P<namespace>[^/?]+)/pods/(?P<name>[^/?]+)/log"
_PODS = {"Running": "Running", "Succeeded": "Succeeded", "Failed": "Failed"}


class Pod:
    """One pod, which the controller's thread watches."""

    def __init__(self, task: Task, running: Running) -> None:
        self.task = task
        self.running = running
        self.is_evicted = False
        self.phase = "Running"
        self._kill_at = math.inf

    def end(self) -> None:
        """Ask the pod to end, once."""
        if self.phase == "Running" and self._kill_at == math.inf:
            self._kill_at = time.monotonic() + GRACE_S
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.running.pid, 15)

    def look(self) -> str | None:
        """Return what has happened to the pod since the last look."""
        if self.phase != "Running":
            return None
        status = self.running.process.exitcode
        if status is None:
            if time.monotonic() > self._kill_at:
                kill_all(self.running.pid)
            return None
        self.phase = "Failed" if status or self.is_evicted else "Succeeded"
        if self.is_evicted:
            return "PodEvicted"
        return "PodFailed" if status else None


class JobInCluster:
    """One job; the cluster's lock guards it."""

    def __init__(self, body: dict[str, object], spec: Job) -> None:
        self.body = body  # as it was submitted
        self.spec = spec
        self.phase = "Pending"
        self.num_retries = 0
        self.pods: dict[str, Pod] = {}  # by task
        self.is_deleted = False

    def status(self) -> dict[str, object]:
        """Return the status that the API tells."""
        count = {name: {"phase": {pod.phase: 1}} for name, pod in self.pods.items()}
        state = {"phase": self.phase}
        status = {"state": state, "retryCount": self.num_retries}
        return {**self.body, "status": {**status, "taskStatusCount": count}}

    def react(self) -> None:
        """Do what follows from the ends of pods."""
        for pod in self.pods.values():
            event = pod.look()
            policies = pod.task.policies or self.spec.spec.policies
            actions = [p.action for p in policies if p.event in (event, "*")]
            if event and actions == ["RestartJob"] and self.phase == "Running":
                self.phase = "Restarting"
                self.num_retries += 1
        has_ended = all(pod.phase != "Running" for pod in self.pods.values())
        if self.is_deleted or self.phase == "Restarting":
            for pod in self.pods.values():
                pod.end()
        if self.phase == "Restarting" and has_ended and not self.is_deleted:
            is_over = self.num_retries >= (self.spec.spec.max_retry or 3)
            self.phase = "Failed" if is_over else "Pending"
        elif self.phase == "Running" and has_ended:
            failed = any(pod.phase == "Failed" for pod in self.pods.values())
            self.phase = "Failed" if failed else "Completed"


class Cluster:
    """The cluster, from here to the end of a ``with`` block.

    Args:
        processes: starts the pods' processes, and has their logs.
        image: variables of all containers, as those of an image.
        secrets: keys and values, by the name of a Secret.
        claims: folders, by the name of a PersistentVolumeClaim.
        hosts: where pods run, in turn; without one, here.

    Attributes:
        jobs: all that are there, by name.
        kubeconfig: a file for the clients of this cluster.
    """

    def __init__(
        self,
        processes: Processes,
        image: Mapping[str, str],
        *,
        secrets: Mapping[str, Mapping[str, str]] | None = None,
        claims: Mapping[str, Path] | None = None,
        hosts: Sequence[Host] = (),
    ) -> None:
        self._processes, self._image, self._hosts = processes, image, hosts
        self._secrets, self._claims = secrets or {}, claims or {}
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self.jobs: dict[str, JobInCluster] = {}  # guarded by _lock
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.cluster = self  # type: ignore[attr-defined]
        self._threads = [
            threading.Thread(target=self._server.serve_forever, args=(_TICK_S,)),
            threading.Thread(target=self._control),
        ]
        self.kubeconfig = processes.folder / "kubeconfig"
        self.kubeconfig.write_text(self._config())

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._server.shutdown()
        for thread in self._threads:
            thread.join()
        self._server.server_close()

    def evict(self, job: str, task: str) -> None:
        """Take a pod from its node, as when that is drained."""
        with self._lock:
            pod = self.jobs[job].pods[task]
            pod.is_evicted = True
            pod.end()

    def output(self) -> str:
        """Return what all pods that are there have written."""
        with self._lock:
            pods = [pod for job in self.jobs.values() for pod in job.pods.values()]
        return "".join(pod.running.output() for pod in pods)

    def _config(self) -> str:
        server = f"http://127.0.0.1:{self._server.server_port}"
        context = {"cluster": "c", "user": "u", "namespace": NAMESPACE}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "contexts": [{"name": "c", "context": context}],
            "clusters": [{"name": "c", "cluster": {"server": server}}],
            "users": [{"name": "u", "user": {"token": TOKEN}}],
        }
        return json.dumps(config)

    def _control(self) -> None:
        while not self._is_over.wait(_TICK_S):
            with self._lock:
                for name, job in list(self.jobs.items()):
                    if job.phase == "Pending" and not job.is_deleted:
                        job.phase = "Failed"  # if anything is raised
                        self._start(name, job)
                        job.phase = "Running"
                    job.react()
                    ended = all(pod.phase != "Running" for pod in job.pods.values())
                    if job.is_deleted and ended:
                        del self.jobs[name]

    def _start(self, name: str, job: JobInCluster) -> None:
        tasks = job.spec.spec.tasks
        hosts = [
            self._hosts[n % len(self._hosts)]
            for n in range(len(tasks) * bool(self._hosts))
        ]
        told = {"VC_TASK_INDEX": "0", "VK_TASK_INDEX": "0"}
        for number, task in enumerate(tasks):
            key = task.name.upper().replace("-", "_")
            address = hosts[number].address if hosts else f"127.0.2.{number + 1}"
            told |= {f"VC_{key}_HOSTS": address, f"VC_{key}_NUM": "1"}
        for number, task in enumerate(tasks):
            (container,) = task.template.spec.containers
            self._link_volumes(task)
            _, *arguments = container.command
            target = [run_on, hosts[number], run_module] if hosts else [run_module]
            running = self._processes.start(
                f"{name}-{task.name}-0.{job.num_retries}",
                *target,
                *arguments,
                env={**self._image, **self._variables(container), **told},
                inherits=False,
            )
            running.log.touch()
            job.pods[task.name] = Pod(task, running)

    def _variables(self, container: Container) -> dict[str, str]:
        variables = {}
        for variable in container.env:
            variables[variable.name] = variable.value or ""
            if variable.value_from is not None:
                ref = variable.value_from.secret_key_ref
                variables[variable.name] = self._secrets[ref.name][ref.key]
        return variables

    def _link_volumes(self, task: Task) -> None:
        pod = task.template.spec
        volumes = {volume.name: volume for volume in pod.volumes}
        for mount in pod.containers[0].volume_mounts:
            volume, path = volumes[mount.name], Path(mount.mount_path)
            source = None
            if volume.persistent_volume_claim is not None:
                source = self._claims[volume.persistent_volume_claim.claim_name]
            elif volume.host_path is not None:
                source = Path(volume.host_path.path)
            if source is not None and not path.exists():
                assert path.is_relative_to(self._processes.folder)
                path.symlink_to(source)

    # What the API's handlers call

    def submit(self, body: dict[str, object]) -> tuple[HTTPStatus, object]:
        """Add a job, if Volcano would accept it."""
        try:
            spec = msgspec.convert(body, Job)
        except msgspec.ValidationError as exc:
            return HTTPStatus.UNPROCESSABLE_ENTITY, str(exc)
        name = str(spec.metadata.name)
        with self._lock:
            if name in self.jobs:
                return HTTPStatus.CONFLICT, f"{name} is there"
            if spec.spec.queue != QUEUE:
                return HTTPStatus.BAD_REQUEST, f"no queue {spec.spec.queue}"
            self.jobs[name] = JobInCluster(body, spec)
        return HTTPStatus.CREATED, body

    def status(self, name: str) -> tuple[HTTPStatus, object]:
        """Return a job with its status."""
        with self._lock:
            if name not in self.jobs:
                return HTTPStatus.NOT_FOUND, f"no job {name}"
            return HTTPStatus.OK, self.jobs[name].status()

    def list(self) -> tuple[HTTPStatus, object]:
        """Return all jobs."""
        with self._lock:
            return HTTPStatus.OK, {"items": [j.status() for j in self.jobs.values()]}

    def delete(self, name: str) -> tuple[HTTPStatus, object]:
        """Begin to delete a job, and its pods."""
        with self._lock:
            if name not in self.jobs:
                return HTTPStatus.NOT_FOUND, f"no job {name}"
            self.jobs[name].is_deleted = True
        return HTTPStatus.OK, {"kind": "Status", "status": "Success"}

    def pod(self, name: str) -> Pod | None:
        """Return a pod by its full name."""
        with self._lock:
            for job in self.jobs.values():
                for task, pod in job.pods.items():
                    if job.spec.pod_name(task) == name:
                        return pod
        return None


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        body = json.loads(self.rfile.read(size))
        self._answer(self._match(_JOBS) and self.server.cluster.submit(body))

    def do_GET(self) -> None:
        cluster = self.server.cluster
        if one := self._match(rf"{_JOBS}/(?P<name>[^/?]+)/status"):
            self._answer(cluster.status(one["name"]))
        elif self._match(_JOBS):
            self._answer(cluster.list())
        elif one := self._match(_LOG):
            self._send_log(cluster.pod(one["name"]))
        else:
            self._answer(None)

    def do_DELETE(self) -> None:
        one = self._match(rf"{_JOBS}/(?P<name>[^/?]+)")
        self._answer(one and self.server.cluster.delete(one["name"]))

    def log_message(self, *_: object) -> None:
        """Write nothing."""

    def _match(self, pattern: str) -> re.Match[str] | None:
        found = re.fullmatch(pattern, self.path.partition("?")[0])
        is_ours = found is not None and found["namespace"] == NAMESPACE
        return found if is_ours else None

    def _answer(self, answer: tuple[HTTPStatus, object] | None) -> None:
        status, content = answer or (HTTPStatus.NOT_FOUND, f"no {self.path}")
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            status, content = HTTPStatus.UNAUTHORIZED, "who are you?"
        if status >= HTTPStatus.BAD_REQUEST:
            content = {"kind": "Status", "status": "Failure", "message": content}
        self._begin(status, "application/json")
        self.wfile.write(json.dumps(content).encode())

    def _send_log(self, pod: Pod | None) -> None:
        if pod is None:
            self._answer(None)
            return
        self._begin(HTTPStatus.OK, "text/plain")
        follows = "follow=True" in self.path
        with pod.running.log.open("rb") as log, contextlib.suppress(OSError):
            while True:
                is_running = pod.phase == "Running"
                for line in log:
                    now = f"{datetime.now(UTC).isoformat()} ".encode()
                    self.wfile.write(now + line)
                if not (follows and is_running):
                    return
                time.sleep(_TICK_S)

    def _begin(self, status: HTTPStatus, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
