"""Where the embedding workers of an inference job are, under PERSIA's name."""

from persia_torchrec import env
from persia_torchrec.errors import ConfigError


def get_embedding_worker_services() -> list[str]:
    """Return the addresses of the embedding workers, for ``InferCtx``.

    They are what ``EMBEDDING_WORKER_SERVICE`` says, with commas between them; when it
    is unset, ``embedding_worker:8887``: the name of the service in PERSIA's files.
    """
    text = env.text("EMBEDDING_WORKER_SERVICE") or "embedding_worker:8887"
    addresses = [part.strip() for part in text.split(",")]
    if not all(addresses):
        raise ConfigError(
            "EMBEDDING_WORKER_SERVICE must list addresses as host:port, with commas "
            f"between them. Received: {text!r}."
        )
    return addresses
