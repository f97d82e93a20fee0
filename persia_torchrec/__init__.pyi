"""The public names, and where they are: ``__init__.py`` imports each on first use."""

from persia_torchrec import (
    ctx as ctx,
    data as data,
    embedding as embedding,
    logger as logger,
    prelude as prelude,
    service as service,
    utils as utils,
)
from persia_torchrec.client.client import (
    EmbeddingClient as EmbeddingClient,
)
from persia_torchrec.client.bulk import RowBlock as RowBlock, blocks_of as blocks_of
from persia_torchrec.device.batches import (
    HostKeyedJaggedTensor as HostKeyedJaggedTensor,
    LoadedBatch as LoadedBatch,
    TorchRecBatch as TorchRecBatch,
)
from persia_torchrec.embedding.admission import (
    AdmitAll as AdmitAll,
    AdmitBloom as AdmitBloom,
    AdmitFrequency as AdmitFrequency,
    AdmitProbability as AdmitProbability,
)
from persia_torchrec.embedding.usage import DynamicDim as DynamicDim
from persia_torchrec.embedding.usage import Expiry as Expiry
from persia_torchrec.embedding.initializer import (
    Constant as Constant,
    InverseSqrtDim as InverseSqrtDim,
    Normal as Normal,
    TruncatedNormal as TruncatedNormal,
    Uniform as Uniform,
)
from persia_torchrec.embedding.optim import (
    FTRL as FTRL,
    LAMB as LAMB,
    LARS as LARS,
    SGD as SGD,
    Adagrad as Adagrad,
    AdagradDecay as AdagradDecay,
    Adam as Adam,
    AdamAsync as AdamAsync,
    AdamW as AdamW,
    RowwiseAdam as RowwiseAdam,
    RowwiseLAMB as RowwiseLAMB,
)
from persia_torchrec.errors import (
    PersiaError as PersiaError,
)
from persia_torchrec.persia.kjt import (
    from_torchrec as from_torchrec,
    to_torchrec as to_torchrec,
)
from persia_torchrec.server.cluster import (
    EmbeddingCluster as EmbeddingCluster,
)
from persia_torchrec.sharding.cache_settings import Cache as Cache
from persia_torchrec.sharding.mixed import (
    MixedSharder as MixedSharder,
    Placement as Placement,
)
from persia_torchrec.sharding.multi_hash import (
    MultiHashEmbeddingBagCollection as MultiHashEmbeddingBagCollection,
)
from persia_torchrec.sharding.training_blocks import accumulate as accumulate
from persia_torchrec.sharding.all_sharders import (
    RemoteEmbeddingBagSharder as RemoteEmbeddingBagSharder,
    RemoteFeatureProcessedEmbeddingBagCollectionSharder as RemoteFeatureProcessedEmbeddingBagCollectionSharder,
    RemoteFusedEmbeddingBagCollectionSharder as RemoteFusedEmbeddingBagCollectionSharder,
    RemoteFusedEmbeddingCollectionSharder as RemoteFusedEmbeddingCollectionSharder,
    remote_sharders as remote_sharders,
)
from persia_torchrec.sharding.sharder import (
    RemoteEmbeddingBagCollectionSharder as RemoteEmbeddingBagCollectionSharder,
    RemoteEmbeddingCollectionSharder as RemoteEmbeddingCollectionSharder,
    RemoteSharder as RemoteSharder,
)
from persia_torchrec.sharding.state_dict import (
    load_tables as load_tables,
    plain_state_dict as plain_state_dict,
    read_table as read_table,
)
from persia_torchrec.sharding.checks import describe_placement as describe_placement
from persia_torchrec.sharding.training_blocks import join as join
from persia_torchrec.table import (
    TableSettings as TableSettings,
)
from persia_torchrec.training.checkpoint import (
    load_checkpoint as load_checkpoint,
    save_checkpoint as save_checkpoint,
)
from persia_torchrec.training.schedule import (
    save_delta as save_delta,
)
from persia_torchrec.training.export import (
    export_for_serving as export_for_serving,
)
from persia_torchrec.training.recoverable import (
    recoverable as recoverable,
)
from persia_torchrec.version import (
    __version__ as __version__,
)
