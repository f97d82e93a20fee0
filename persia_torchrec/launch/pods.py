"""What a role's pods have in Kubernetes: ``pod`` of the roles file, over torchx's.

Its keys are those of a pod's ``spec``, as Kubernetes has them, and ``labels`` and
``annotations`` of its ``metadata``. Maps are merged, lists add up. ``securityContext``
is one section of both: what only containers have, as ``allowPrivilegeEscalation``, goes
to the container, all else to the pod. ``imagePullSecrets`` may be names. Other
schedulers have no pods, and ignore it, as they do volumes::

    all:
      pod:
        imagePullSecrets: [registry]
        labels: {team: ads}
        nodeSelector: {pool: gpu}
        tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
        securityContext: {runAsUser: 1000, fsGroup: 1000, runAsNonRoot: true}
"""

from collections.abc import Mapping
from typing import Any

from persia_torchrec.errors import ConfigError
from persia_torchrec.parsing.yaml_file import nearest

_CONTAINERS_ONLY = {
    *("allowPrivilegeEscalation", "capabilities", "privileged", "procMount"),
    "readOnlyRootFilesystem",
}
_TYPES: dict[str, tuple[Any, str]] = {
    "str": (str, "text"),
    "int": (int, "an integer"),
    "bool": (bool, "true or false"),
    "list": (list, "a list"),
    "dict": (dict, "a map"),
}
_TMP = {"name": "tmp", "mountPath": "/tmp"}


def over(above: Any, below: Any) -> Any:
    """Return what both say: maps are merged, lists add up, else the first holds."""
    if isinstance(above, dict) and isinstance(below, dict):
        own = {key: over(one, below.get(key)) for key, one in above.items()}
        return {**below, **own}
    both_add_up = isinstance(above, list) and isinstance(below, list)
    return [*below, *above] if both_add_up else above


def complete(pod: Any, section: Mapping[str, Any], at: str) -> None:
    """Add what a section says to a pod, plain, as torchx makes it.

    Raises:
        ConfigError: Kubernetes knows no such key, or it has another type; ``at`` is the
            path of the section.
    """
    metadata, spec = {"labels": {}, "annotations": {}} | pod["metadata"], dict(section)
    added = {name: spec.pop(name, {}) for name in ("labels", "annotations")}
    context = spec.pop("securityContext", {})
    _require(added, "V1ObjectMeta", at)
    _require(context, "dict(str, object)", f"{at}.securityContext")
    if taken := sorted(added["labels"].keys() & metadata["labels"].keys()):
        raise ConfigError(
            "labels must not be labels that torchx sets to find its jobs. Received: "
            f"{', '.join(taken)}."
        )
    secrets = spec.get("imagePullSecrets", [])
    if isinstance(secrets, list) and secrets:
        named = [{"name": one} if isinstance(one, str) else one for one in secrets]
        spec["imagePullSecrets"] = named
    _require(spec, "V1PodSpec", at)
    own: dict[str, Any] = {}
    for kind, of, names in (
        ("V1PodSecurityContext", spec, context.keys() - _CONTAINERS_ONLY),
        ("V1SecurityContext", own, context.keys() & _CONTAINERS_ONLY),
    ):
        if found := {name: context[name] for name in sorted(names)}:
            _require(found, kind, f"{at}.securityContext")
            of["securityContext"] = found
    pod["metadata"], pod["spec"] = over(added, metadata), over(spec, pod["spec"])
    container = pod["spec"]["containers"][0]
    container.update(own)
    if context.get("readOnlyRootFilesystem"):
        _mount_tmp(pod["spec"], container)


def _mount_tmp(spec: dict[str, Any], container: dict[str, Any]) -> None:
    """Mount a folder that can be written to where torchrun and numba keep files."""
    mounts = container.setdefault("volumeMounts", [])
    if all(one["mountPath"].rstrip("/") != _TMP["mountPath"] for one in mounts):
        mounts.append(_TMP)
        spec.setdefault("volumes", []).append({"name": _TMP["name"], "emptyDir": {}})


def _require(value: Any, kind: str, at: str) -> None:
    """Raise ConfigError unless a value is of a type of Kubernetes' client."""
    from kubernetes import client  # optional, and there where torchx asks Kubernetes

    model: Any = getattr(client, kind, None)
    outer, _, inner = kind.replace("(", "[").rstrip(")]").partition("[")
    type_, must = _TYPES.get("dict" if model else outer, (object, ""))
    if not isinstance(value, type_) or (type_ is int and isinstance(value, bool)):
        raise ConfigError(f"{at} must be {must}. Received: {value!r}.")
    if outer == "list":
        for number, one in enumerate(value):
            _require(one, inner, f"{at}[{number}]")
    elif model is None and outer == "dict":
        for key, one in value.items():
            _require(one, inner.partition(", ")[2], f"{at}.{key}")
    elif model is not None:
        known = {camel: snake for snake, camel in model.attribute_map.items()}
        for key, one in value.items():
            if key not in known:
                raise ConfigError(f"{at}.{key} is unknown. {nearest(key, known)}")
            _require(one, model.openapi_types[known[key]], f"{at}.{key}")
