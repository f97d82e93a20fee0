"""The names of the door, and where they are; see the package's own stub."""

from persia_torchrec.persia.batch import (
    check_pyarray_dtype_valid as check_pyarray_dtype_valid,
)
from persia_torchrec.persia.utils import (
    is_cuda_feature_available as is_cuda_feature_available,
)
from persia_torchrec.persia.loader import (
    PersiaBatchDataSender as PersiaBatchDataSender,
    PersiaTrainingBatch as PersiaTrainingBatch,
)
