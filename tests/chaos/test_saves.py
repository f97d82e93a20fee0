"""Saves that are interrupted: what is loaded of their files, at each moment."""

import itertools
import os
import shutil
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.delta_job import Job
from tests.support.processes import wait_until
from tests.support.servers import DEADLINE_S, Servers

_CHANGES = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "open"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


class Moments:
    """Copies of a folder, as a kill would leave it before each change of a file.

    Changes are those of all threads of this process, while ``is_on``.
    """

    def __init__(self, folder: Path) -> None:
        self.copies: list[Path] = []
        self.is_on = False
        self._folder, self._lock = folder, threading.Lock()
        self._copying = threading.local()
        self._last: list[tuple[str, int, int]] = []
        sys.addaudithook(self._hear)

    def restore(self, copy: Path) -> None:
        """Make the folder what it was when it was copied."""
        shutil.rmtree(self._folder)
        shutil.copytree(copy, self._folder)

    def _hear(self, event: str, arguments: tuple) -> None:
        if not self.is_on or event not in _CHANGES or hasattr(self._copying, "now"):
            return
        if event == "open" and not arguments[2] & _WRITES:
            return
        with self._lock:
            self.copy()

    def copy(self) -> None:
        """Copy the folder, unless it is as it was; other threads write meanwhile."""
        self._copying.now = True
        try:
            self._copy()
        finally:
            del self._copying.now

    def _copy(self) -> None:
        to = self._folder.with_name(f"moment {len(self.copies)}")
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            found = self._files()
            if found == self._last:
                return
            try:
                shutil.copytree(self._folder, to)
            except shutil.Error:
                shutil.rmtree(to)
                continue
            if self._files() == found:
                self.copies.append(to)
                self._last = found
                return
            shutil.rmtree(to)
        raise AssertionError("the folder was never at rest")

    def _files(self) -> list[tuple[str, int, int]]:
        found = []
        for root, folders, names in os.walk(self._folder):
            for name in folders + names:
                path = Path(root, name)
                try:
                    status = path.stat()
                except FileNotFoundError:
                    continue
                size = status.st_size if name in names else 0
                found.append((str(path), size, status.st_ino))
        return sorted(found)


def test_each_moment_of_a_delta_loads_it_or_the_one_before(tmp_path, record_property):
    folder = tmp_path / "job"
    moments = Moments(folder)
    with Servers() as servers, closing(Job(servers, folder, 2)) as job:
        job.train(5)
        job.save()
        job.train(4)
        job.save_delta()
        states = [job.snapshot()]
        job.train(4)
        states.append(job.snapshot())
        moments.is_on = True
        job.save_delta()
        moments.is_on = False
        moments.copy()
    found = []
    for copy, num_servers in zip(moments.copies, itertools.cycle([2, 1, 3])):
        moments.restore(copy)
        with Servers() as servers:
            resumed = Job(servers, folder, num_servers, increments_dir=None)
            with closing(resumed):
                resumed.load()
                found.append(states.index(resumed.snapshot()))
    assert found == sorted(found)
    assert {found[0], found[-1]} == {0, 1}
    record_property("kills", len(found))


def test_each_moment_of_a_save_that_deletes_loads_it_or_the_one_before(
    tmp_path, record_property
):
    folder = tmp_path / "job"
    moments = Moments(folder)
    with Servers() as servers, closing(Job(servers, folder, 2)) as job:
        for _ in range(2):
            job.train(3)
            job.save(keep=1)
            job.train(3)
            job.save_delta()
        states = [job.snapshot()]
        job.train(3)
        states.append(job.snapshot())
        moments.is_on = True
        for _ in range(2):  # increments of the one before are deleted by the second
            job.save(keep=1)
        wait_until(
            lambda: num_found(folder, "*/*.increment") == 2, "increments are deleted"
        )
        moments.is_on = False
        moments.copy()
    found = []
    for copy in moments.copies:
        moments.restore(copy)
        with Servers() as servers, closing(Job(servers, folder, 2)) as resumed:
            resumed.load()
            found.append(states.index(resumed.snapshot()))
            resumed.train(1)
            resumed.save(keep=1)
            last = resumed.save(keep=1)
            assert [last.path] == [str(path) for path in (folder / "run").iterdir()]
            wait_until(lambda: num_found(folder, "*") == 2, "other logs are deleted")
    assert found == sorted(found)
    assert {found[0], found[-1]} == {0, 1}
    record_property("kills", len(found))


def num_found(folder, pattern):
    return len(list((folder / "increments").glob(pattern)))
