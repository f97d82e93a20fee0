"""What training and evaluation share: the connections of a trainer."""

from types import TracebackType
from typing import Self

from torch import nn

from persia_torchrec.ctx.lookup_ctx import LookupCtx, PreprocessMode
from persia_torchrec.data.loader import enter_context, entered_context, leave_context
from persia_torchrec.embedding import EmbeddingConfig
from persia_torchrec.errors import ConfigError
from persia_torchrec.training.engine import Engine


class EmbeddingCtx(LookupCtx):
    """Look up embeddings and run the dense model on them.

    Enter it within a ``TrainCtx``, whose connections it uses. Entering it waits until
    the updates that this trainer has sent so far are applied, so that what has been
    trained is what is evaluated; it changes nothing on the servers.

    Args:
        preprocess_mode: what to make of batches; ``EVAL``, or ``INFERENCE``.
        model: the dense model; that of the ``TrainCtx`` by default.

    Raises:
        ConfigError: no ``TrainCtx`` is entered.
    """

    model: nn.Module

    def __init__(
        self, preprocess_mode: PreprocessMode, model: nn.Module | None = None
    ) -> None:
        self.preprocess_mode = preprocess_mode
        self._engine = self._find_engine()
        self.model = model if model is not None else self._model_of_outer()

    @property
    def _source(self) -> Engine:
        return self._engine

    def get_embedding_size(self) -> list[int]:
        """Return how many rows each embedding server holds."""
        return self._engine.client.num_rows()

    def configure_embedding_parameter_servers(
        self, embedding_config: EmbeddingConfig
    ) -> None:
        """Change how rows start and how far weights go; waits for all servers.

        Updates that this trainer sent before are applied with the settings of before,
        later ones with the new. The rows that are there keep their weights, until an
        update clamps them to the new bound. All trainers of a job should set the same.

        Args:
            embedding_config: the new settings of every table, but for those that the
                ``tables`` of the ``TrainCtx`` gave it.

        Raises:
            PersiaError: a server refuses, or an earlier update failed.
        """
        self._engine.configure(embedding_config)

    def clear_embeddings(self) -> None:
        """Drop all rows on all embedding servers."""
        self._engine.flush()
        self._engine.client.clear()

    def __enter__(self) -> Self:
        """Enter the context.

        Raises:
            PersiaError: an update before an evaluation failed.
        """
        if self.preprocess_mode is not PreprocessMode.TRAIN:
            self._engine.flush()
        enter_context(self)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        leave_context(self)

    def _find_engine(self) -> Engine:
        outer = entered_context()
        if not isinstance(outer, EmbeddingCtx):
            raise ConfigError(
                "An evaluation context must be made within a TrainCtx, whose servers "
                "it reads. Received: none is entered."
            )
        return outer._engine

    def _model_of_outer(self) -> nn.Module:
        outer = entered_context()
        assert isinstance(outer, EmbeddingCtx)
        return outer.model


def eval_ctx(model: nn.Module | None = None) -> EmbeddingCtx:
    """Return a context for evaluation; see :class:`EmbeddingCtx`."""
    return EmbeddingCtx(PreprocessMode.EVAL, model)
