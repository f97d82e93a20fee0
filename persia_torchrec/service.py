"""Where the embedding workers of an inference job are, under PERSIA's name."""

from persia_torchrec import env

_DEFAULT = "embedding_worker:8887"


def get_embedding_worker_services() -> list[str]:
    """Return the addresses of the embedding workers, for ``InferCtx``.

    They are what ``EMBEDDING_WORKER_SERVICE`` says, with commas between them; when it
    is unset, ``embedding_worker:8887``: the name of the service in PERSIA's files.

    Example:
        ``InferCtx(get_embedding_worker_services())``
    """
    return env.embedding_worker_services() or [_DEFAULT]
