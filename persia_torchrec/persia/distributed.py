"""PERSIA's options of data parallelism for the dense model.

``persia/data_parallel.py`` carries them out. Embeddings are on the servers only.

    DDPOption               torch's DistributedDataParallel
    BaguaDistributedOption  the algorithms that PERSIA took from Bagua. Bagua is no
                            longer maintained, so each is what PyTorch has for it:

        gradient_allreduce            DistributedDataParallel: gradients are averaged
        bytegrad                      the same, with gradients of 8 bits per number
        decentralized                 each trainer steps by its own gradient, then the
                                      weights are averaged, at every step
        async                         the same, averaged every few steps
        low_precision_decentralized   rejected: PyTorch has no equivalent
        qadam                         rejected likewise; it did not work in PERSIA

In Bagua's ``async`` a thread averages every 500 ms; here all trainers do after
``averaging_period`` steps, so that a run does not depend on the speed of its machines.
"""

from dataclasses import KW_ONLY, dataclass, fields

from persia_torchrec.env import MAX_PORT
from persia_torchrec.errors import ConfigError

DEFAULT_MASTER_PORT = 23456
DEFAULT_BUCKET_BYTES = 10 * 1024**2

ALGORITHMS = ("gradient_allreduce", "bytegrad", "decentralized", "async")
"""The algorithms of Bagua that can be chosen."""

REJECTED_ALGORITHMS = {
    "low_precision_decentralized": (
        "It exchanges compressed weights with the two neighbours in a ring. PowerSGD "
        "compresses gradients, which all share, so that for this PyTorch has no "
        "equivalent. Use 'decentralized', or 'bytegrad' to save bytes."
    ),
    "qadam": (
        "It replaces the dense optimizer by one of Bagua's own, for which PyTorch has "
        "no equivalent. Use 'bytegrad' with torch.optim.Adam."
    ),
}
"""The other algorithms of Bagua, and what to do instead."""

_HONOURED = (
    *("master_port", "master_addr", "algorithm"),
    *("default_bucket_size", "averaging_period"),
)


@dataclass(frozen=True)
class DistributedBaseOption:
    """What all options have: where the trainers meet. Use a subclass."""

    _: KW_ONLY

    master_port: int | None = None
    """TCP port of rank 0 at which the trainers meet. None: the launcher's
    ``MASTER_PORT``, or 23456 without one."""

    master_addr: str | None = None
    """Host of rank 0. None: the launcher's ``MASTER_ADDR``."""

    def __post_init__(self) -> None:
        port = self.master_port
        _require(
            port is None or 1 <= port <= MAX_PORT,
            f"master_port must be in [1, {MAX_PORT}]. Received: {port}.",
        )

    def backend_for(self, device_type: str) -> str:
        """Return torch's backend for a dense model on ``"cuda"`` or ``"cpu"``."""
        return "nccl" if device_type == "cuda" else "gloo"

    @property
    def period(self) -> int | None:
        """Steps from one average of the weights to the next; None: of gradients."""
        return None


@dataclass(frozen=True)
class DDPOption(DistributedBaseOption):
    """Average the gradients of all trainers, with torch's ``DistributedDataParallel``.

    Buffers, as the running means of a BatchNorm, stay each trainer's own.

    Args:
        initialization_method: how the trainers meet, ``"tcp"`` or ``"file"``.
        backend: ``"nccl"`` for CUDA devices, ``"gloo"`` for the CPU.
        init_method: another name for ``initialization_method``, in PERSIA's pages.
        sync_file: with ``"file"``: a path that all trainers share. It must not exist
            before the job.
    """

    initialization_method: str = "tcp"
    backend: str = "nccl"
    _: KW_ONLY
    init_method: str | None = None
    sync_file: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init_method is not None:
            _require(
                self.initialization_method in ("tcp", self.init_method),
                "init_method and initialization_method are two names of one setting. "
                f"Received: {self.init_method!r} and {self.initialization_method!r}.",
            )
            object.__setattr__(self, "initialization_method", self.init_method)
        method = self.initialization_method
        _require_known("backend", self.backend, ("nccl", "gloo"))
        _require_known("initialization_method", method, ("tcp", "file"))
        _require(
            (method == "file") == (self.sync_file is not None),
            "sync_file must be given with initialization_method='file', and only then. "
            f"Received: {self.sync_file!r} with {method!r}.",
        )
        _require(
            method == "tcp" or (self.master_addr, self.master_port) == (None, None),
            "master_addr and master_port must not be given with "
            "initialization_method='file': the trainers meet at sync_file.",
        )

    def backend_for(self, device_type: str) -> str:
        """Return the backend; ``"nccl"`` is rejected on the CPU."""
        _require(
            self.backend == "gloo" or device_type == "cuda",
            "DDPOption: backend must be 'gloo' on the CPU. Received: 'nccl'. Pass "
            "backend='gloo', or a device_id to the context.",
        )
        return self.backend


@dataclass(frozen=True)
class BaguaDistributedOption(DistributedBaseOption):
    """Keep the copies equal by one of Bagua's algorithms, as PyTorch has them.

    They also work on the CPU; the head of this file says what each does. The weights of
    all trainers are equal at the end of the context; buffers, as the running means of a
    BatchNorm, stay each trainer's own.

    Args:
        algorithm: one of :data:`ALGORITHMS`.
        default_bucket_size: bytes of gradients that are sent at once, of
            ``gradient_allreduce`` and ``bytegrad``.
        averaging_period: steps from one average to the next, of ``async`` only; None
            is 4. It replaces Bagua's ``sync_interval_ms``.

    The other settings, of Bagua's tuning service and network library, have no
    counterpart here, and must have their defaults.
    """

    algorithm: str
    _: KW_ONLY
    default_bucket_size: int = DEFAULT_BUCKET_BYTES
    averaging_period: int | None = None
    autotune_level: int = 0
    bagua_service_port: int = 29501
    autotune_max_samples: int = 60
    autotune_warmup_time: int = 30
    is_output_autotune_log: bool = False
    autotune_sampling_confidence_time: float = 5.0
    enable_bagua_net: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        algorithm, size = self.algorithm, self.default_bucket_size
        _require(
            algorithm not in REJECTED_ALGORITHMS,
            f"algorithm must not be {algorithm!r}. "
            f"{REJECTED_ALGORITHMS.get(algorithm)}",
        )
        _require_known("algorithm", algorithm, ALGORITHMS)
        for field in fields(self):
            value = getattr(self, field.name)
            _require(
                value == field.default or field.name in _HONOURED,
                f"{field.name} must be {field.default!r}. Received: {value!r}. It "
                "tunes a part of Bagua that has no counterpart here; leave it out.",
            )
        _require(size >= 1, f"default_bucket_size must be >= 1 byte. Received: {size}.")
        _require(
            size == DEFAULT_BUCKET_BYTES or self.period is None,
            f"default_bucket_size must be left out with {algorithm!r}, which sends no "
            "gradients.",
        )
        if (period := self.averaging_period) is not None:
            _require(
                algorithm == "async",
                "averaging_period must be left out unless the algorithm is 'async'. "
                f"Received: {period} with {algorithm!r}.",
            )
            _require(period >= 1, f"averaging_period must be >= 1. Received: {period}.")

    @property
    def period(self) -> int | None:
        """See :class:`DistributedBaseOption`."""
        periods = {"decentralized": 1, "async": self.averaging_period or 4}
        return periods.get(self.algorithm)


def get_default_distributed_option(device_id: int | None = None) -> DDPOption:
    """Return the default option for a CUDA device, or for the CPU (None)."""
    return DDPOption(backend="gloo" if device_id is None else "nccl")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _require_known(name: str, value: str, known: tuple[str, ...]) -> None:
    message = f"{name} must be one of {', '.join(known)}. Received: {value!r}."
    _require(value in known, message)
