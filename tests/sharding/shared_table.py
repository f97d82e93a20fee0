"""A table that two features share."""

from torchrec import EmbeddingBagConfig, PoolingType

DIM = 4


def tables(pooling=PoolingType.SUM):
    return [
        EmbeddingBagConfig(
            *(10, DIM), name="term", feature_names=["ad", "query"], pooling=pooling
        )
    ]
