"""The names of the door, and where they are; see the package's own stub."""

from persia_torchrec.lookup.bags import MAX_BATCH_SIZE as MAX_BATCH_SIZE
from persia_torchrec.persia.batch import (
    _ND_ARRAY_SUPPORT_TYPE as _ND_ARRAY_SUPPORT_TYPE,
    DTYPES as DTYPES,
    MAGIC as MAGIC,
    NO_WORKER as NO_WORKER,
    S as S,
    VERSION as VERSION,
    Buffer as Buffer,
    Count as Count,
    Dense as Dense,
    IDFeature as IDFeature,
    IDTypeFeature as IDTypeFeature,
    IDTypeFeatureWithSingleID as IDTypeFeatureWithSingleID,
    Label as Label,
    NdarrayDataBase as NdarrayDataBase,
    NonIDTypeFeature as NonIDTypeFeature,
    Origin as Origin,
    PersiaBatch as PersiaBatch,
    ReferencedBatch as ReferencedBatch,
    check_pyarray_dtype_valid as check_pyarray_dtype_valid,
    decode_rest as decode_rest,
    describe as describe,
    encode_rest as encode_rest,
)
