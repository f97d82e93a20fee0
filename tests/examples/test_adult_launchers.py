"""The example's Procfile and docker-compose.yml start one whole job."""

import re
import shlex
from collections import defaultdict

import pytest
import yaml

from persia_torchrec import env
from persia_torchrec.persia import launcher as launcher_module
from tests.support.repository import ROOT

EXAMPLE = ROOT / "examples/adult_income"
COMPOSE = yaml.safe_load((EXAMPLE / "docker-compose.yml").read_text())
COMMANDS = {
    "Procfile": re.findall(r"^\w+: (.*)$", (EXAMPLE / "Procfile").read_text(), re.M),
    "docker-compose.yml": [s["command"] for s in COMPOSE["services"].values()],
}


def variables():
    return dict(re.findall(r"^(\w+)=(.*)$", (EXAMPLE / ".env").read_text(), re.M))


@pytest.mark.slow
@pytest.mark.parametrize("file", COMMANDS)
def test_the_coordinator_waits_for_the_processes_that_are_started(file):
    indexes, counts = defaultdict(list), {}
    for command in COMMANDS[file]:
        launcher, *words = shlex.split(command)
        assert launcher == "persia-launcher"
        given = vars(launcher_module.parser().parse_args(words))
        name = given.pop("command").replace("-", "_") + "s"
        if name == "coordinators":
            counts = {one: n for one, n in given.items() if one in persia_counts()}
        elif name == "trainers":
            indexes[name] += range(given.get("nproc_per_node", 1))
        else:
            indexes[name].append(given.get("replica_index", 0))
            sizes = {given.get("replica_size", 1)}
            assert sizes == {num_processes(file, words[0])}
    assert indexes.keys() == set(persia_counts())
    assert counts.items() <= {n: len(found) for n, found in indexes.items()}.items()
    assert all(found == list(range(len(found))) for found in indexes.values())


def persia_counts():
    fields = launcher_module.Coordinator.__dataclass_fields__
    counts = [name for name in fields if name[-1] == "s" and name[-2:] != "_s"]
    return [name for name in counts if name != "restarts"]


def num_processes(file, command):
    return sum(shlex.split(line)[1] == command for line in COMMANDS[file])


def test_the_variables_are_known_and_name_the_files_of_the_example():
    for name, value in variables().items():
        assert name in env.__doc__
        if name.endswith(("ENTRY", "CONFIG")):
            assert (EXAMPLE / value).is_file()


def test_containers_share_the_image_the_variables_and_the_coordinators_name():
    image = "persia-torchrec:${DEVICE:-cpu}"
    for service in COMPOSE["services"].values():
        assert (service["image"], service["env_file"]) == (image, ".env")
        assert service["environment"].keys() == {
            "PERSIA_STORE_HOST",
            "PERSIA_JOB_TOKEN",
        }
        assert service["environment"]["PERSIA_STORE_HOST"] == "coordinator"
        build = service["build"]
        folder = EXAMPLE / build["context"]
        assert (folder / build["dockerfile"]).is_file()
    assert "coordinator" in COMPOSE["services"]
