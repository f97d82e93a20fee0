"""What PERSIA's scripts import of its native module, as far as it has a counterpart."""

from torch.backends.cuda import is_built as is_cuda_feature_available

from persia_torchrec.data.loader import PersiaBatchDataSender, PersiaTrainingBatch
from persia_torchrec.embedding.data import Dense, NdarrayDataBase

__all__ = [
    "PersiaBatchDataSender",
    "PersiaTrainingBatch",
    "check_pyarray_dtype_valid",
    "is_cuda_feature_available",
]


def check_pyarray_dtype_valid(
    py_object: Dense, dtype: object, name: str | None = None
) -> None:
    """Raise BatchError unless a batch may have the array; ``dtype`` is the array's."""
    NdarrayDataBase(py_object, name)
