"""How a server process says that it is ready, or not yet.

To whoever started it, by lines: ``ready ADDRESS``, and before that, if it has to
compile, ``compiling`` and ``compiled``. To clients that know its address, by a refusal.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator

from persia_torchrec.errors import NotReadyError, WireError
from persia_torchrec.wire.messages import Header
from persia_torchrec.wire.transport import Listener

_POLL_MS = 100


def tell_ready(address: str) -> None:
    """Write the line that whoever started the process waits for."""
    _tell(f"ready {address}")


def tell_compiling(is_compiling: bool) -> None:
    """Write a line when compiling begins, so that the time does not count, or ends."""
    _tell("compiling" if is_compiling else "compiled")


@contextlib.contextmanager
def refusing_requests(listener: Listener) -> Iterator[None]:
    """Refuse all requests to a socket within a block, in a thread of its own.

    The thread owns the socket meanwhile.

    Args:
        listener: of a server that cannot do what it is asked yet.
    """
    is_over = threading.Event()

    def refuse() -> None:
        while not is_over.is_set():
            message = listener.receive(_POLL_MS)
            if message is not None:
                peer, frames = message
                error = NotReadyError("compiling its loops.", server=listener.address)
                with contextlib.suppress(WireError):  # no message of ours
                    listener.send_error(peer, Header.decode(frames[0]).request, error)

    thread = threading.Thread(target=refuse, name="not ready", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
