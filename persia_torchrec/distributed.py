"""How the trainers of a job keep their copies of the dense model alike.

PERSIA's options, as settings only; ``training/data_parallel.py`` carries them out. The
embeddings are no part of this: they live on the servers, once.

    DDPOption               torch's DistributedDataParallel
    BaguaDistributedOption  the algorithms that PERSIA took from Bagua. Bagua is no
                            longer maintained, so each is what PyTorch has for it:

        gradient_allreduce            DistributedDataParallel: gradients are averaged
        bytegrad                      the same, gradients travel as 8 bits a number
        decentralized                 each trainer steps by its own gradient, then the
                                      weights are averaged, at every step
        async                         the same, averaged every few steps
        low_precision_decentralized   refused: PyTorch has nothing like it
        qadam                         refused likewise; it did not work in PERSIA either

``async`` is Bagua's but for the clock: there a thread averages every 500 ms of its own
accord, here all trainers meet after ``averaging_period`` steps, so that a run does not
depend on how fast its machines are.
"""

from abc import ABC, abstractmethod
from dataclasses import KW_ONLY, dataclass

from persia_torchrec.errors import ConfigError

DEFAULT_MASTER_PORT = 23456
"""PERSIA's; where the launcher names no other."""

DEFAULT_BUCKET_BYTES = 10 * 1024**2
DEFAULT_AVERAGING_PERIOD = 4
MAX_PORT = 65_535

BACKENDS = ("nccl", "gloo")
INITIALIZATION_METHODS = ("tcp", "file")

ALGORITHMS = ("gradient_allreduce", "bytegrad", "decentralized", "async")
"""The algorithms of Bagua that can be chosen."""

REFUSED_ALGORITHMS = {
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


@dataclass(frozen=True)
class DistributedBaseOption(ABC):
    """What all options say: where the trainers meet; use a subclass."""

    _: KW_ONLY

    master_port: int | None = None
    """TCP port of rank 0 at which the trainers meet. None: the launcher's
    ``MASTER_PORT``, or 23456 without one."""

    master_addr: str | None = None
    """Host of rank 0. None: the launcher's ``MASTER_ADDR``."""

    def __post_init__(self) -> None:
        if self.master_port is not None and not 1 <= self.master_port <= MAX_PORT:
            raise ConfigError(
                f"master_port must be in [1, {MAX_PORT}]. Received: {self.master_port}."
            )

    @abstractmethod
    def backend_for(self, device_type: str) -> str:
        """Return torch's name of what carries the bytes.

        Args:
            device_type: of the dense model, ``"cuda"`` or ``"cpu"``.

        Raises:
            ConfigError: the chosen backend cannot serve such a device.
        """

    @property
    def file(self) -> str | None:
        """The file at which the trainers meet, or None: they meet over TCP."""
        return None


@dataclass(frozen=True)
class DDPOption(DistributedBaseOption):
    """Average the gradients of all trainers, with torch's ``DistributedDataParallel``.

    As TorchRec sets it up: buffers, as the running means of a BatchNorm, stay each
    trainer's own.

    Args:
        initialization_method: how the trainers meet, ``"tcp"`` or ``"file"``.
        backend: ``"nccl"`` for CUDA devices, ``"gloo"`` for the CPU.
        init_method: the same as ``initialization_method``: PERSIA's documentation
            calls it so, and PERSIA ignores it.
        master_port: see :class:`DistributedBaseOption`.
        master_addr: see :class:`DistributedBaseOption`.
        sync_file: with ``"file"``: a path that all trainers share. It must not exist
            before the job.

    Raises:
        ConfigError: a value is none of those above, or two of them contradict.
    """

    initialization_method: str = "tcp"
    backend: str = "nccl"
    _: KW_ONLY
    init_method: str | None = None
    sync_file: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init_method is not None:
            if self.initialization_method not in ("tcp", self.init_method):
                raise ConfigError(
                    "init_method and initialization_method are two names of one "
                    f"setting. Received: {self.init_method!r} and "
                    f"{self.initialization_method!r}. Give one."
                )
            object.__setattr__(self, "initialization_method", self.init_method)
        _require("backend", self.backend, BACKENDS)
        _require(
            "initialization_method", self.initialization_method, INITIALIZATION_METHODS
        )
        is_file = self.initialization_method == "file"
        if is_file != (self.sync_file is not None):
            raise ConfigError(
                "sync_file must be given with initialization_method='file', and only "
                f"then. Received: {self.sync_file!r} with "
                f"{self.initialization_method!r}."
            )
        if is_file and (self.master_addr is not None or self.master_port is not None):
            raise ConfigError(
                "master_addr and master_port must not be given with "
                "initialization_method='file': the trainers meet at sync_file."
            )

    def backend_for(self, device_type: str) -> str:
        """Return the backend; ``"nccl"`` is refused on the CPU."""
        if self.backend == "nccl" and device_type != "cuda":
            raise ConfigError(
                "DDPOption: backend must be 'gloo' on the CPU. Received: 'nccl', which "
                "serves CUDA devices only. Pass backend='gloo', or a device_id to the "
                "context."
            )
        return self.backend

    @property
    def file(self) -> str | None:
        """The file at which the trainers meet, or None: they meet over TCP."""
        return self.sync_file


@dataclass(frozen=True)
class BaguaDistributedOption(DistributedBaseOption):
    """Keep the copies alike by one of Bagua's algorithms, as PyTorch has them.

    Unlike Bagua's they also work on the CPU. The head of this file says what each
    does. The weights of all trainers are equal at the end of the context, whatever the
    algorithm; buffers, as the running means of a BatchNorm, stay each trainer's own.

    Args:
        algorithm: one of :data:`ALGORITHMS`.
        default_bucket_size: bytes of gradients that are sent at once, of
            ``gradient_allreduce`` and ``bytegrad``.
        averaging_period: steps from one average to the next, of ``async`` only; None
            is 4. It stands where Bagua has ``sync_interval_ms``.
        autotune_level: 0; Bagua's tuning service has no counterpart, here or in
            PyTorch. So the settings of that service, and of Bagua's own network
            library, can have no other value than their default:
        bagua_service_port: of the tuning service.
        autotune_max_samples: of the tuning service.
        autotune_warmup_time: of the tuning service.
        is_output_autotune_log: of the tuning service.
        autotune_sampling_confidence_time: of the tuning service.
        enable_bagua_net: of the network library.
        master_port: see :class:`DistributedBaseOption`.
        master_addr: see :class:`DistributedBaseOption`.

    Raises:
        ConfigError: there is no such algorithm, or a setting that it cannot honour.
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
        if self.algorithm in REFUSED_ALGORITHMS:
            raise ConfigError(
                f"algorithm must not be {self.algorithm!r}. "
                f"{REFUSED_ALGORITHMS[self.algorithm]}"
            )
        _require("algorithm", self.algorithm, ALGORITHMS)
        for name in _OF_BAGUA_ALONE:
            default = type(self).__dataclass_fields__[name].default
            if getattr(self, name) != default:
                raise ConfigError(
                    f"{name} must be {default!r}. Received: {getattr(self, name)!r}. "
                    "It tunes a part of Bagua that has no counterpart here; leave it "
                    "out."
                )
        self._check_sizes()

    def _check_sizes(self) -> None:
        if self.default_bucket_size < 1:
            raise ConfigError(
                "default_bucket_size must be >= 1 byte. "
                f"Received: {self.default_bucket_size}."
            )
        if self.averages_weights and self.default_bucket_size != DEFAULT_BUCKET_BYTES:
            raise ConfigError(
                f"default_bucket_size must be left out with {self.algorithm!r}, which "
                "sends no gradients."
            )
        if self.averaging_period is None:
            return
        if self.algorithm != "async":
            raise ConfigError(
                "averaging_period must be left out unless the algorithm is 'async'. "
                f"Received: {self.averaging_period} with {self.algorithm!r}."
            )
        if self.averaging_period < 1:
            raise ConfigError(
                f"averaging_period must be >= 1. Received: {self.averaging_period}."
            )

    @property
    def averages_weights(self) -> bool:
        """Whether weights are averaged, instead of gradients."""
        return self.algorithm in ("decentralized", "async")

    @property
    def period(self) -> int:
        """Steps from one average of the weights to the next."""
        if self.algorithm != "async":
            return 1
        return self.averaging_period or DEFAULT_AVERAGING_PERIOD

    def backend_for(self, device_type: str) -> str:
        """Return ``"nccl"`` for CUDA, ``"gloo"`` for the CPU."""
        return "nccl" if device_type == "cuda" else "gloo"


_OF_BAGUA_ALONE = (
    "autotune_level",
    "bagua_service_port",
    "autotune_max_samples",
    "autotune_warmup_time",
    "is_output_autotune_log",
    "autotune_sampling_confidence_time",
    "enable_bagua_net",
)


def get_default_distributed_option(device_id: int | None = None) -> DDPOption:
    """Return what a context uses when it is given no option.

    Args:
        device_id: CUDA device of the dense model; None is the CPU.

    Example:
        >>> get_default_distributed_option().backend
        'gloo'
    """
    return DDPOption(backend="gloo" if device_id is None else "nccl")


def _require(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(
            f"{name} must be one of {', '.join(known)}. Received: {value!r}."
        )
