"""What roles of a job ask for: a file, what several sections say, and its limits."""

import math

import pytest

from persia_torchrec.errors import ConfigError
from persia_torchrec.launch.roles import RoleSettings, read_settings

FILE = """
all: {image: "job:7", volumes: ["census:/data:ro"], env: {LEVEL: info, ZONE: a}}
server: {replicas: 3, cpu: 500m, memory: 64Gi, volumes: ["/ssd:/rows"], env: {ZONE: b}}
trainer:
"""


@pytest.fixture
def read(tmp_path):
    def read(text):
        path = tmp_path / "roles.yml"
        path.write_text(text)
        return read_settings(str(path))

    return read


def test_a_section_stands_over_that_of_all(read):
    found = read(FILE)
    assert found["server"].env == {"LEVEL": "info", "ZONE": "b"}
    assert found["trainer"].env == {"LEVEL": "info", "ZONE": "a"}
    assert found["server"].volumes == ("census:/data:ro", "/ssd:/rows")
    assert (found["server"].replicas, found["trainer"].replicas) == (3, None)
    assert {settings.image for settings in found.values()} == {"job:7"}


def test_amounts_are_those_of_kubernetes(read):
    resource = read(FILE)["server"].resource(gpus=2)
    assert (resource.cpu, resource.gpu) == (0.5, 2)
    assert resource.memMB == math.ceil(64 * 2**30 / 10**6)
    of_scheduler = RoleSettings().resource(0)
    assert (of_scheduler.cpu, of_scheduler.memMB) == (-1, -1)


def test_volumes_are_claims_or_paths_of_the_host(read):
    claim, path = read(FILE)["server"].mounts()
    assert (claim.src, claim.dst_path, claim.read_only) == ("census", "/data", True)
    assert (path.src_path, path.dst_path, path.read_only) == ("/ssd", "/rows", False)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{cpu: 8Gi}", "cpu must be a number of processors"),
        ("{memory: 64}", "memory must be at least 64Mi"),
        ("{memory: 5x}", "with one of Kubernetes' units"),
        ("{volumes: [data]}", "volumes must list CLAIM:/PATH"),
        ("{volumes: ['a:/x', 'b:/x']}", "must mount one volume at a path"),
        ("{env: {9: a}}|{env: {'9': a}}", "must have names of letters"),
        ("{secrets: {TOKEN: census}}", "secrets must say SECRET/KEY"),
        ("{replica: 1}", "replica is unknown. Did you mean 'replicas'"),
    ],
)
def test_a_setting_that_is_wrong_is_rejected(read, section, message):
    with pytest.raises(ConfigError, match=message):
        read(f"server: {section.rpartition('|')[2]}")
    with pytest.raises(ConfigError, match=r"all\.replicas must be left out"):
        read("all: {replicas: 2}")
