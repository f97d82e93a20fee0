"""The names of the door, and where they are; see the package's own stub."""

from persia_torchrec.persia.distributed import (
    ALGORITHMS as ALGORITHMS,
    DEFAULT_BUCKET_BYTES as DEFAULT_BUCKET_BYTES,
    DEFAULT_MASTER_PORT as DEFAULT_MASTER_PORT,
    REJECTED_ALGORITHMS as REJECTED_ALGORITHMS,
    BaguaDistributedOption as BaguaDistributedOption,
    DDPOption as DDPOption,
    DistributedBaseOption as DistributedBaseOption,
    get_default_distributed_option as get_default_distributed_option,
)
