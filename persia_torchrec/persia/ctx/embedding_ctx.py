"""Lookups without training: in a job, or outside of any by addresses of workers."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from persia_torchrec import timeouts
from persia_torchrec.embedding.table_defaults import EmbeddingConfig
from persia_torchrec.errors import ConfigError, RemoteError
from persia_torchrec.persia.ctx.base_ctx import PreprocessMode
from persia_torchrec.persia.ctx.lookup_ctx import LookupCtx
from persia_torchrec.persia.engine import Engine, connect_to_job, reconfigure
from persia_torchrec.persia.loader import entered_context
from persia_torchrec.persia.slots import LookupHello, wait_until_ready
from persia_torchrec.persia.slots_reader import SlotsReader
from persia_torchrec.persia.worker_client import RemoteWorkers
from persia_torchrec.rpc.addresses import tcp_address
from persia_torchrec.training import checkpoint

_NO_TABLES = (
    "Received: servers without any. They come with the first TrainCtx of the job, or "
    "with load_checkpoint or load_embedding."
)


class EmbeddingCtx(LookupCtx):
    """Look up embeddings and run the dense model on them.

    Within a ``TrainCtx`` it uses that one's connections: entering it waits until the
    updates that this trainer has sent so far are applied. Anywhere else in a job, in a
    process that the environment tells of it, it has connections of its own from when it
    is made until it is left; what a trainer elsewhere has sent last may not be seen yet
    then. Leaving it waits for a dump and a load that are under way.

    Args:
        preprocess_mode: what to make of batches. Outside a ``TrainCtx`` ``TRAIN`` reads
            as ``EVAL`` does; the embeddings want a gradient, which nothing sends.
        model: the dense model; that of the context around this one by default.
        embedding_config: sent to the servers when the context is entered, as by
            :meth:`configure_embedding_parameter_servers`; None changes nothing there.
        threadpool_worker_size: see :class:`BaseCtx`.
        device_id: CUDA device of tensors. None is the CPU; within a ``TrainCtx`` it is
            that one's device, and another is rejected.

    Raises:
        ConfigError: this process belongs to no job, or a setting cannot work.
        DiscoveryError: workers or servers did not register in time.
    """

    embeddings: "Engine | ReadOnlyEmbeddings"

    def __init__(
        self,
        preprocess_mode: PreprocessMode,
        model: nn.Module | None = None,
        embedding_config: EmbeddingConfig | None = None,
        threadpool_worker_size: int = 10,
        device_id: int | None = None,
    ) -> None:
        super().__init__(threadpool_worker_size, device_id)
        self.preprocess_mode = preprocess_mode
        self.embedding_config = embedding_config
        self._own: ReadOnlyEmbeddings | None = None
        self._connect()
        outer = entered_context()
        if model is None and isinstance(outer, EmbeddingCtx):
            model = outer.model
        self.model = model

    def wait_servers_ready(self, timeout_s: float = timeouts.READY_S) -> None:
        """Wait until all servers answer, and workers with the tables made so far."""
        self.embeddings.wait_until_ready(timeout_s)

    def get_embedding_size(self) -> list[int]:
        """Return how many rows each embedding server holds."""
        return self.embeddings.client.num_rows()

    def configure_embedding_parameter_servers(
        self, embedding_config: EmbeddingConfig
    ) -> None:
        """Change how rows start and how far weights go; waits for all servers.

        Updates that this trainer sent before are applied with the previous settings.
        Rows keep their weights, until an update clamps them to the new bound. All
        trainers of a job should set the same. What a trainer's ``tables`` gave a table
        stays within its ``TrainCtx``. Outside of one it holds for all tables that the
        servers have, until a trainer sends its own: with its next learning rate.
        """
        if self._is_skipped("configure_embedding_parameter_servers()"):
            return
        self.embeddings.configure(embedding_config)

    def clear_embeddings(self) -> None:
        """Drop all rows on all embedding servers."""
        if self._is_skipped("clear_embeddings()"):
            return
        self.embeddings.flush()
        self.embeddings.client.clear()

    def dump_checkpoint(
        self,
        dst_dir: str,
        dense_filename: str = "dense.pt",
        jit_dense_filename: str = "jit_dense.pt",
        blocking: bool = True,
        with_jit_model: bool = False,
    ) -> None:
        """Write a checkpoint of the dense model and the embeddings to a new folder.

            dst_dir/checkpoint-00000001/
              dense.pt                     the model's state_dict, by torch.save
              jit_dense.pt                 with_jit_model: for torch.jit.load
              shard-00000-of-00002.rows    one per server
              manifest.json                written last: the checkpoint is complete
            dst_dir/dense.pt, jit_dense.pt   replaced then, each in one step

        Every rank may call it, or rank 0 alone, which writes; the others only wait for
        their own updates. All updates that this trainer has sent are in it. With
        several trainers under way, those that others have sent last may not be, up to
        the bound on staleness.

        Args:
            dst_dir: a folder that trainers and servers share, made if it is missing,
                or a URL that fsspec knows.
            dense_filename: of the model's state.
            jit_dense_filename: of the model as TorchScript.
            blocking: False returns when the dense files are written. Servers write rows
                while training continues, each as it is at some moment until
                :meth:`wait_for_dump_embedding` returns.
            with_jit_model: write the model as TorchScript too.

        Raises:
            CheckpointError: it cannot be written, or an earlier dump failed.
            ConfigError: TorchScript does not take the model, or a name is no good.
        """
        jit_filename = jit_dense_filename if with_jit_model else None
        files = self._dense_files(dense_filename, jit_filename)
        self.embeddings.checkpoints.dump(dst_dir, files, blocking=blocking)

    def load_checkpoint(
        self,
        src_dir: str,
        map_location: str | None = None,
        dense_filename: str = "dense.pt",
        blocking: bool = True,
    ) -> None:
        """Load the dense model and the embeddings; all ranks call it together.

        What model and servers hold is replaced. The servers may be more or fewer than
        those that wrote the checkpoint.

        Args:
            src_dir: what :meth:`dump_checkpoint` was given, for the latest complete
                checkpoint in it, or the path of one.
            map_location: where ``torch.load`` reads the file to; the CPU by default.
                The model stays on its device.
            dense_filename: of the model's state.
            blocking: False returns when the model is loaded; the servers reject lookups
                until :meth:`wait_for_load_embedding`.

        Raises:
            CheckpointError: there is no complete checkpoint, or it does not fit model
                or tables; with ``blocking`` and unless the model's own file is at
                fault, nothing has changed.
        """
        model = self._require_model()
        if self._is_skipped("load_checkpoint()"):
            return
        self.embeddings.checkpoints.load(
            src_dir, {dense_filename: model}, map_location, blocking=blocking
        )

    def dump_embedding(self, dst_dir: str, blocking: bool = True) -> None:
        """Write a checkpoint of the embeddings alone: :meth:`dump_checkpoint`."""
        self.embeddings.checkpoints.dump(dst_dir, {}, blocking=blocking)

    def load_embedding(self, src_dir: str, blocking: bool = True) -> None:
        """Load the embeddings alone: :meth:`load_checkpoint`."""
        if self._is_skipped("load_embedding()"):
            return
        self.embeddings.checkpoints.load(src_dir, {}, blocking=blocking)

    def wait_for_dump_embedding(self) -> None:
        """Wait until no dump is under way; raise the error of the last one, once."""
        self.embeddings.checkpoints.wait_for_dump()

    def wait_for_load_embedding(self) -> None:
        """As :meth:`wait_for_dump_embedding`, of a load; all ranks call it together."""
        self.embeddings.checkpoints.wait_for_load()

    def _dense_files(self, dense: str, jit: str | None) -> dict[str, bytes]:
        """Return the model's files by name; none where another rank writes them."""
        if not checkpoint.is_first():
            return {}
        model = self._require_model()
        files = {dense: checkpoint.state_bytes(model.state_dict())}
        if jit is not None:
            files[jit] = checkpoint.script_bytes(model, self._extra_files())
        return files

    @contextlib.contextmanager
    def _block(self) -> Iterator[None]:
        """Connect if it was left before, and wait for earlier updates."""
        self._connect()
        try:
            if self.preprocess_mode is not PreprocessMode.TRAIN:
                self.embeddings.flush()
            if self.embedding_config is not None:
                self.configure_embedding_parameter_servers(self.embedding_config)
            yield
            if self._own is not None:
                self._own.checkpoints.wait_for_dump()
                self._own.checkpoints.wait_for_load()
        finally:
            self._disconnect()

    def _connect(self) -> None:
        """Use the connections of the context around this one, or else its own."""
        outer = entered_context()
        if isinstance(outer, EmbeddingCtx):
            self._disconnect()
            self.embeddings = outer.embeddings
            if self.device_id not in (None, self.embeddings.device.index):
                raise ConfigError(
                    "device_id must equal that of the enclosing context, "
                    f"{self.embeddings.device.index}. Received: {self.device_id}."
                )
        elif self._own is None:
            self._own = self.embeddings = ReadOnlyEmbeddings(self._device)

    def _disconnect(self) -> None:
        if self._own is not None:
            self._own.close()
        self._own = None


def eval_ctx(
    model: nn.Module | None = None,
    embedding_config: EmbeddingConfig | None = None,
    threadpool_worker_size: int = 10,
    device_id: int | None = None,
) -> EmbeddingCtx:
    """Return a context for evaluation; see :class:`EmbeddingCtx`."""
    return EmbeddingCtx(
        PreprocessMode.EVAL, model, embedding_config, threadpool_worker_size, device_id
    )


class InferCtx(LookupCtx):
    """Look up embeddings for inference; nothing changes on the servers.

    It belongs to no job and needs no environment. Its workers may be those of a job
    that trains, or stand over servers that have loaded a checkpoint. It connects in the
    background; any thread may use it.

    Args:
        embedding_worker_address_list: of all embedding workers, as ``"10.0.0.1:7000"``,
            ``"10.0.0.1: 7000"`` or ``"tcp://10.0.0.1:7000"``; batches go to them in
            turn.
        model: the dense model, already on its device; None for embeddings alone.
        embedding_config: None; here because PERSIA has it here.
        threadpool_worker_size: see :class:`BaseCtx`.
        device_id: CUDA device of tensors; None is the CPU.
        timeout_s: seconds that a lookup may take.
    """

    preprocess_mode = PreprocessMode.INFERENCE
    embeddings: SlotsReader

    def __init__(
        self,
        embedding_worker_address_list: Sequence[str],
        model: nn.Module | None = None,
        embedding_config: None = None,
        threadpool_worker_size: int = 10,
        device_id: int | None = None,
        *,
        timeout_s: float = timeouts.REQUEST_S,
    ) -> None:
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s must be > 0. Received: {timeout_s}.")
        if embedding_config is not None:
            raise ConfigError(
                "embedding_config must be None: an InferCtx changes nothing on the "
                f"servers. Received: {embedding_config}. It is for TrainCtx."
            )
        super().__init__(threadpool_worker_size, device_id)
        self.model = model
        addresses = [tcp_address(a) for a in embedding_worker_address_list]
        self._workers = RemoteWorkers(addresses, timeout_s=timeout_s)
        self.embeddings = SlotsReader(
            self._workers,
            self._device,
            timeout_s=2 * timeout_s + 5,
            patience_s=min(timeout_s, timeouts.AWAY_S),
        )

    def wait_for_serving(self, timeout_s: float = timeouts.READY_S) -> None:
        """Wait until all workers and their servers answer and have their tables."""
        self.embeddings.wait_until_ready(timeout_s)

    def get_embedding_size(self) -> list[int]:
        """Return how many rows each embedding server holds."""
        return list(self.embeddings.hello().num_rows)

    def close(self) -> None:
        """Close the connections; workers and servers live on. May be called twice."""
        self.embeddings.close()
        self._workers.close()

    @contextlib.contextmanager
    def _block(self) -> Iterator[None]:
        with contextlib.closing(self):
            yield


class ReadOnlyEmbeddings(SlotsReader):
    """Reads the embeddings of a job, in a process that does not train them."""

    takes_references = True

    def __init__(self, device: torch.device) -> None:
        self.client, self._workers = connect_to_job()
        timeout_s = 2 * timeouts.TRAINING_REQUEST_S + self._workers.recovery_s
        super().__init__(self._workers, device, timeout_s=timeout_s)
        self.checkpoints = checkpoint.ContextCheckpoints(self.client, self.flush)

    def hello(
        self, timeout_s: float | None = None, *, of_any: bool = False
    ) -> LookupHello:
        """Return slots and rows; raise ConfigError if there are no tables yet."""
        try:
            return super().hello(timeout_s, of_any=of_any)
        except RemoteError as exc:
            if self.client.learn_tables():
                raise
            raise ConfigError(
                f"A lookup needs the tables of the slots. {_NO_TABLES}"
            ) from exc

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until the servers answer, and the workers too once there are tables."""

        def ask(timeout_s: float) -> LookupHello:
            if self.client.learn_tables():
                return self.hello(timeout_s)
            return LookupHello(tuple(self.client.num_rows(timeout_s)))

        wait_until_ready(ask, timeout_s)

    def configure(self, config: EmbeddingConfig) -> None:
        """Change how rows start and how far weights may go; waits for the servers."""
        specs = self.client.learn_tables()
        if not specs:
            raise ConfigError(
                f"An embedding config must be of tables. {_NO_TABLES} "
                "Call configure_embedding_parameter_servers when they are there."
            )
        changed = [reconfigure(spec, config) for spec in specs]
        if changed != specs:
            self._workers.add_tables(changed)

    def flush(self) -> None:
        """Do nothing: no update is sent from here."""

    def close(self) -> None:
        """Close all connections. May be called twice."""
        super().close()
        self.checkpoints.close()
        self._workers.close()
        self.client.close()
