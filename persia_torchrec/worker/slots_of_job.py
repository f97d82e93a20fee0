"""How trainers learn the slots of a job: from its embedding workers.

PERSIA gives ``embedding_config.yml`` to embedding workers and servers only. A trainer
needs it here too, since its embeddings are a TorchRec collection; so the workers leave
the text of the file in the job's address book. All of them must have the same slots:
what one pools by another rule, the trainer could not tell apart.
"""

from pathlib import Path

from persia_torchrec.config import EmbeddingSchema, parse_embedding_config, read_text
from persia_torchrec.errors import ConfigError
from persia_torchrec.wire.discovery import AddressBook

_NOTE = "embedding_config"


def tell_slots(book: AddressBook, path: Path, *, warns: bool = True) -> EmbeddingSchema:
    """Read the file, and leave it in the address book; each embedding worker does.

    Args:
        book: of the job.
        path: of ``embedding_config.yml``.
        warns: as of :func:`load_embedding_config`.

    Raises:
        ConfigError: the file cannot be read or has a mistake, or another worker of the
            job has other slots.
    """
    text = read_text(path)
    # Before anybody else reads it.
    schema = parse_embedding_config(text, path, warns=warns)
    known = parse_embedding_config(
        book.claim_note(_NOTE, text), "that of another embedding worker", warns=False
    )
    if known != schema:
        raise ConfigError(
            "All embedding workers of a job must have the same slots. Received: "
            f"{path}, which differs from that of another worker. Give all of them the "
            "same embedding_config.yml."
        )
    return schema


def ask_for_slots(store: tuple[str, int, str], *, timeout_s: float) -> EmbeddingSchema:
    """Return the slots that the embedding workers of a job have told.

    Args:
        store: where the address book is, as ``env.job_store()`` tells.
        timeout_s: seconds to wait for the first worker.

    Raises:
        DiscoveryError: none has come within ``timeout_s``.
        JobError: the job has failed meanwhile.
    """
    book = AddressBook.join(*store)
    try:
        (text,) = book.ask([_NOTE], timeout_s=timeout_s)
    finally:
        book.close()
    return parse_embedding_config(text, "embedding_config.yml of the job", warns=False)
