"""Sections of a roles file over a pod: how they are merged, and what is rejected."""

import copy

import pytest

from persia_torchrec.errors import ConfigError
from persia_torchrec.launch.pods import complete, over

pytest.importorskip("kubernetes", reason="needs the extra kubernetes")

POD = {
    "metadata": {"labels": {"role": "server"}},
    "spec": {
        "containers": [
            {"name": "a", "volumeMounts": [{"name": "m", "mountPath": "/m"}]}
        ],
        "volumes": [{"name": "m", "emptyDir": {}}],
        "nodeSelector": {},
    },
}


def completed(**section):
    pod = copy.deepcopy(POD)
    complete(pod, section, "server.pod")
    return pod


def test_maps_are_merged_lists_add_up_and_other_values_replace():
    above = {"a": {"x": 1, "new": 5}, "list": [2], "plain": "b"}
    below = {"a": {"x": 0, "y": 2}, "list": [1], "plain": "a", "kept": True}
    assert over(above, below) == {
        "a": {"x": 1, "y": 2, "new": 5},
        "list": [1, 2],
        "plain": "b",
        "kept": True,
    }
    assert below["list"] == [1]


def test_a_section_that_is_empty_changes_nothing():
    pod = completed()
    assert pod["spec"] == POD["spec"]
    assert pod["metadata"]["labels"] == POD["metadata"]["labels"]


def test_what_containers_alone_have_goes_to_the_container():
    context = {"runAsUser": 7, "privileged": False, "capabilities": {"drop": ["ALL"]}}
    pod = completed(securityContext=context)
    assert pod["spec"]["securityContext"] == {"runAsUser": 7}
    (container,) = pod["spec"]["containers"]
    assert container["securityContext"] == {
        "capabilities": {"drop": ["ALL"]},
        "privileged": False,
    }


def test_a_root_that_is_read_only_gets_a_folder_unless_one_is_mounted():
    context = {"readOnlyRootFilesystem": True}
    spec = completed(securityContext=context)["spec"]
    assert spec["volumes"][-1] == {"name": "tmp", "emptyDir": {}}
    assert spec["containers"][0]["volumeMounts"][-1]["mountPath"] == "/tmp"
    pod = copy.deepcopy(POD)
    pod["spec"]["containers"][0]["volumeMounts"][0]["mountPath"] = "/tmp/"
    complete(pod, {"securityContext": context}, "server.pod")
    assert len(pod["spec"]["volumes"]) == 1


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"hostnetwork": True}, r"server\.pod\.hostnetwork is unknown.*hostNetwork"),
        ({"hostNetwork": "yes"}, "hostNetwork must be true or false. Received: 'yes'"),
        ({"affinity": {"podAffinity": {"x": 1}}}, r"podAffinity\.x is unknown"),
        ({"initContainers": [{"name": 7}]}, r"initContainers\[0\]\.name must be text"),
        ({"annotations": {"a": 1}}, r"annotations\.a must be text"),
        (
            {"labels": {"role": "b"}},
            "that torchx sets to find its jobs. Received: role",
        ),
    ],
)
def test_what_kubernetes_does_not_know_is_named_with_its_path(section, message):
    with pytest.raises(ConfigError, match=message):
        completed(**section)
