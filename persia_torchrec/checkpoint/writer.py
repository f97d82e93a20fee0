"""The lease of a folder: one job at a time writes its checkpoints or increments.

    folder/.writer.json    job, host and process of the writer, and a number that grows
                           with each of its heartbeats

A second writer is rejected when it starts, with both ids. It takes the folder over if
the first one is known to have ended, or has sent no heartbeat for
``timeouts.WRITER_SILENT_S``, or if it is told to. Processes of one job share a folder:
one that starts again does not wait. Readers are not asked.

There are no locks, which NFS may not have. Clocks of two hosts are not compared: the
age of a heartbeat is by the file system's clock, or it is watched. A writer that has
lost its folder learns that with its next heartbeat.
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
import time

import msgspec

from persia_torchrec import timeouts
from persia_torchrec.checkpoint.folder import Folder
from persia_torchrec.errors import CheckpointError, ConfigError
from persia_torchrec.processes import process_table, start_of

logger = logging.getLogger(__name__)

WRITER_FILE = ".writer.json"
_BEAT_S = 5.0
_LOOK_S = 0.5


class Writer(msgspec.Struct, frozen=True):
    """Who writes in a folder; ``process`` is of its host's kernel, or empty."""

    job: str
    host: str
    process: str
    beat: str = ""

    def has_ended(self) -> bool:
        """Return whether its process is known to have ended: one of this machine."""
        table, _, pid = self.process.rpartition("/")
        own, _, _ = _process(os.getpid()).rpartition("/")
        is_known = bool(table) and table.split()[:2] == own.split()[:2]
        return is_known and _process(int(pid)) != self.process

    def __str__(self) -> str:
        return f"job {self.job!r} on host {self.host}"


class FolderWriter:
    """This process as a writer of a folder, from here to :meth:`release`.

    A thread sends heartbeats. Any thread may call the methods.

    Args:
        folder: made, if it is missing.
        job: the id of the job, or of a process of no job.
        pid: the process that lives as long as the job writes; by default this one.
        takes_over: take it from a writer that may live.

    Raises:
        ConfigError: another job writes there, or this process cannot.
    """

    def __init__(
        self,
        folder: Folder,
        job: str,
        *,
        pid: int | None = None,
        takes_over: bool = False,
        silent_s: float = timeouts.WRITER_SILENT_S,
        beat_s: float = _BEAT_S,
    ) -> None:
        self._folder = folder
        self._own = Writer(job, socket.gethostname(), _process(pid or os.getpid()))
        self._beat_s = beat_s
        self._ending = threading.Event()
        self.lost: Writer | None = None  # to whom this folder was lost
        try:
            folder.make()
            self._await_turn(takes_over, silent_s)
            self._beat()
        except CheckpointError as exc:
            raise ConfigError(
                f"{folder.url} must be a folder that this process may write to. "
                f"Received: {exc}"
            ) from exc
        self._thread = threading.Thread(
            target=self._keep_beating, name="folder heartbeat", daemon=True
        )
        self._thread.start()

    def require(self) -> None:
        """Raise CheckpointError if another job has taken the folder over."""
        if self.lost is not None:
            raise CheckpointError(
                f"{self._folder.url} must be this job's own. Received: {self.lost} "
                f"has taken it over from {self._own}. Give each job its own folder."
            )

    def release(self) -> None:
        """Leave the folder to others. May be called twice."""
        self._ending.set()
        self._thread.join(_LOOK_S)
        with contextlib.suppress(CheckpointError):
            holder = read_writer(self._folder)
            if holder is not None and holder.job == self._own.job:
                self._folder.remove(WRITER_FILE)

    def _await_turn(self, takes_over: bool, silent_s: float) -> None:
        """Return once no other job writes here; ConfigError if one does."""
        first = read_writer(self._folder)
        if first is None or first.job == self._own.job:
            return
        why = "as it was told to" if takes_over else "whose process has ended"
        if not takes_over and not first.has_ended():
            began_s = time.monotonic() - self._folder.age_s(WRITER_FILE)
            why = f"which has sent no heartbeat for {silent_s:g} s"
            if time.monotonic() - began_s < silent_s:
                logger.warning(
                    "%s is written by %s; if that is silent for %g s, it is taken over "
                    "(--take-over does not wait)",
                    self._folder.url,
                    first,
                    silent_s,
                )
            while time.monotonic() - began_s < silent_s:
                time.sleep(min(_LOOK_S, silent_s))
                now = read_writer(self._folder)
                if now is None or now.job == self._own.job:
                    return
                if now != first:
                    raise ConfigError(
                        f"{self._folder.url} must have one writer. Received: {now}, "
                        f"which writes there, and {self._own}. Give each job its own "
                        "folder, or end the other one."
                    )
        logger.warning(
            "%s is taken over by %s from %s, %s",
            self._folder.url,
            self._own,
            first,
            why,
        )

    def _beat(self) -> None:
        beat = msgspec.structs.replace(self._own, beat=secrets.token_hex(8))
        self._folder.write_json(WRITER_FILE, beat)

    def _keep_beating(self) -> None:
        while not self._ending.wait(self._beat_s):
            try:
                holder = read_writer(self._folder)
                if holder is not None and holder.job != self._own.job:
                    self.lost = holder
                    logger.error(
                        "%s was taken over by %s: %s stops writing there",
                        self._folder.url,
                        holder,
                        self._own,
                    )
                    return
                if not self._ending.is_set():
                    self._beat()
            except CheckpointError as exc:  # the next one may succeed
                logger.warning("the writer's heartbeat failed: %s", exc)


def read_writer(folder: Folder) -> Writer | None:
    """Return who writes in a folder, as far as is known there, or None."""
    try:
        if folder.file_size(WRITER_FILE) is None:
            return None
        writer: Writer = folder.read_json(WRITER_FILE, Writer)
    except CheckpointError:
        if folder.file_size(WRITER_FILE) is None:  # it has left meanwhile
            return None
        raise
    return writer


def require_free(folder: Folder, job: str) -> None:
    """Raise ConfigError if another job, which lives, writes in a folder."""
    holder = read_writer(folder)
    if holder is None or holder.job == job or holder.has_ended():
        return
    if folder.age_s(WRITER_FILE) < timeouts.WRITER_SILENT_S:
        raise ConfigError(
            f"{folder.url} must have one writer. Received: {holder}, which writes "
            f"there, and job {job!r}. Save to another folder."
        )


def name_of_process(pid: int) -> str:
    """Return the id of a writer that belongs to no job: of a process of this host."""
    return f"process {pid} on {socket.gethostname()}"


def _process(pid: int) -> str:
    """Name a process: boot, namespace, start and number; empty: it is not known."""
    table, start = process_table(), start_of(pid)
    return f"{table} {start}/{pid}" if table and start else ""
