"""The proof of the job's token, in ZeroMQ's handshake of each connection.

ZeroMQ ends the connection of a client that does not prove it, and nothing that such a
client sends is a message here. The token itself never travels. The mechanisms:

    NULL   there is no token, and no proof: a listener accepts the loopback only
    PLAIN  the client sends a name, and in place of a password its digest, keyed with
           the token. The name is the client's time, a nonce, its job, and whom it
           means, as "embedding server 3". A listener accepts a name once, only while
           it is new, as MUNGE does with its credentials, and only if it is meant.
           Whom the client means follows from the address book, or the order of
           addresses, and never from an address, which proxies change
    CURVE  of the address book, and with ``PERSIA_ENCRYPT=1`` of all. The listener's key
           is derived from the token, so that both ends prove the token by what they
           make of the other's fresh keys. All that is sent is encrypted

A name is drawn for each socket. One that has waited for its listener for too long, or
that ZeroMQ connects again, is rejected: its client opens another socket.
"""

import errno
import hmac
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable

import zmq
from zmq.utils import z85

from persia_torchrec import env, timeouts
from persia_torchrec.errors import ConfigError
from persia_torchrec.rpc.greeting import NO_JOB, Greeting

logger = logging.getLogger(__name__)


Options = dict[zmq.SocketOption, int | bytes]

REJECTIONS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""Events of a client's socket that :class:`Proof` understands."""

_ASKED = "inproc://zeromq.zap.01"  # where ZeroMQ asks who may connect (its RFC 27)
_LEAST_BITS = 96  # of a token
_MAX_NAMES = 2**18
_MAX_REJECTIONS = 4  # in a row; a listener that is killed rejects, too
_LOG_S = 10.0
_FOR_ANOTHER = 500  # status of a proof that is meant for another listener
_MUST = (
    "PERSIA_JOB_TOKEN_FILE, or PERSIA_JOB_TOKEN, must be the same for all processes of "
    "a job, and so must PERSIA_ENCRYPT."
)


def client_options(
    token: str | None, greeting: Greeting = NO_JOB, *, encrypts: bool = False
) -> Options:
    """Return the options of a new socket that proves a token to one listener."""
    if token is None:
        return {}
    if encrypts:
        own, own_secret = zmq.curve_keypair()
        return {
            zmq.CURVE_SERVERKEY: zmq.curve_public(_curve_key(token)),
            zmq.CURVE_PUBLICKEY: own,
            zmq.CURVE_SECRETKEY: own_secret,
        }
    now_s = int(time.time())  # noqa: TID251  # the listener compares its own
    name = f"{now_s:x}.{secrets.token_hex(16)} ".encode() + _meant(greeting)
    return {zmq.PLAIN_USERNAME: name, zmq.PLAIN_PASSWORD: _digest(token, name)}


def listener_options(
    context: "zmq.Context[zmq.Socket[bytes]]",
    greeting: Greeting,
    *,
    encrypts: bool = False,
) -> Options:
    """Return the options of a socket to which clients prove this process's token.

    ``greeting`` says whom they must mean. The context must be the listener's own; a
    thread answers for it until it ends.
    """
    token = env.job_token()
    if token is None:
        return {}
    if encrypts or env.encrypts():
        return {zmq.CURVE_SERVER: 1, zmq.CURVE_SECRETKEY: _curve_key(token)}
    ZapAuthenticator(context, token, greeting)
    return {zmq.PLAIN_SERVER: 1, zmq.ZAP_DOMAIN: b"persia_torchrec"}


def weakness(token: str | None) -> str:
    """Return why a token may be guessed, or "".

    Who has read a proof can try tokens on a machine of its own, with one digest for
    each. How many bits a token has at most follows from its characters.
    """
    if token is None:
        return ""
    num_different = len(set(token))
    most_bits = len(token) * math.log2(num_different)
    if most_bits >= _LEAST_BITS:
        return ""
    return (
        f"the job's token must be random, of {_LEAST_BITS} bits or more, as from "
        f"`openssl rand -hex 32`. Received: {len(token)} characters, {num_different} "
        f"of them different: {most_bits:.0f} bits at most"
    )


class Proof:
    """How a process proves its token to one listener; owned by one thread.

    Attributes:
        num_refused: how often in a row the listener has rejected, or closed a
            connection as it began. It may accept the next one: it may have been killed
            meanwhile.
    """

    def __init__(self, greeting: Greeting = NO_JOB, *, encrypts: bool = False) -> None:
        self._token, self._greeting = env.job_token(), greeting
        self._encrypts = encrypts or env.encrypts()
        self.num_refused = 0

    def options(self) -> Options:
        """Return the options of a new socket."""
        return client_options(self._token, self._greeting, encrypts=self._encrypts)

    def reject(self, event: int, value: int) -> str:
        """Note a rejection; return why it is final, or ""."""
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            has = "a token, or PERSIA_ENCRYPT=1, at one end only"
            if self._token is None:
                has = "no token here, and one there"
            return f"{_MUST} Received: {has}."
        if (event, value) == (zmq.EVENT_HANDSHAKE_FAILED_AUTH, _FOR_ANOTHER):
            self.num_refused += 1
            return (
                f"This address must be that of {self._greeting.name()}. Received: "
                "another process with the same token is there. Addresses must be all "
                "of one role and job, in the order of their numbers."
            )
        is_closed = value in (errno.EPIPE, errno.ECONNRESET)
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            valid_s = timeouts.PROOF_VALID_S
            has = f"another token there, or clocks that differ by {valid_s:g} s"
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and is_closed:
            token = "a" if self._token is None else "another"
            has = f"connections that end as they begin: {token} token there"
        else:
            self.num_refused = 0
            return ""
        self.num_refused += 1
        return (
            f"{_MUST} Received: {has}." if self.num_refused >= _MAX_REJECTIONS else ""
        )


class ZapAuthenticator:
    """Answers ZeroMQ who may connect to the listeners of a context, until that ends.

    A thread of its own does, so that a listener may be busy; it alone has the socket.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        token: str,
        greeting: Greeting = NO_JOB,
        clock: Callable[[], float] = time.time,  # noqa: TID251  # compared with clients'
    ) -> None:
        self._token, self._greeting = token, greeting
        self._meant = _meant(greeting)
        self._clock = clock
        self._seen: dict[bytes, float] = {}  # when each name was accepted, in order
        self._next_log_s = 0.0
        self._socket = context.socket(zmq.REP)
        self._socket.bind(_ASKED)
        threading.Thread(target=self._run, name="doorkeeper", daemon=True).start()

    def rejection(self, name: bytes, digest: bytes) -> str:
        """Return why a proof is rejected, or "" if it is accepted."""
        if not hmac.compare_digest(digest, _digest(self._token, name)):
            return "it has another token"
        now_s = self._clock()
        apart_s = abs(now_s - int(name.partition(b".")[0], 16))
        if apart_s > timeouts.PROOF_VALID_S:
            return f"its proof is {apart_s:.0f} s old, or the clocks differ by that"
        if name in self._seen:
            return "its proof was used before"
        while self._seen and (
            now_s - next(iter(self._seen.values())) > 2 * timeouts.PROOF_VALID_S
            or len(self._seen) >= _MAX_NAMES
        ):
            del self._seen[next(iter(self._seen))]
        self._seen[name] = now_s
        return ""

    def mismatch(self, name: bytes) -> str:
        """Return why an accepted proof is meant for another listener, or ""."""
        meant = name.partition(b" ")[2]
        if meant == self._meant:
            return ""
        job_id, _, who = meant.decode().partition(" ")
        return self._greeting.mismatch(Greeting(job_id, who))

    def _run(self) -> None:
        try:
            while True:
                _, number, _, address, _, _, *proof = self._socket.recv_multipart()
                why = self.rejection(*proof) if len(proof) == 2 else "it has no proof"
                status = 400 if why else 200
                if not why and (why := self.mismatch(proof[0])):
                    status = _FOR_ANOTHER
                reply = [b"1.0", number, str(status).encode(), b"", b"", b""]
                self._socket.send_multipart(reply)
                if why and time.monotonic() >= self._next_log_s:
                    self._next_log_s = time.monotonic() + _LOG_S
                    logger.warning("rejected a client of %s: %s", address.decode(), why)
        except zmq.ContextTerminated:
            pass  # the listener is closed
        finally:
            self._socket.close(linger=0)


def _meant(greeting: Greeting) -> bytes:
    return f"{greeting.job_id} {greeting.who}".encode()


def _digest(token: str, name: bytes) -> bytes:
    return _keyed(token, b"connection " + name).hex().encode()


def _curve_key(token: str) -> bytes:
    """Return the secret key of the job's listeners."""
    if not zmq.has("curve"):
        raise ConfigError(
            "libzmq must have CURVE, for the address book of a job with a token. "
            f"Received: libzmq {zmq.zmq_version()} without it. Install PyZMQ's wheel."
        )
    return z85.encode(_keyed(token, b"listener's key"))


def _keyed(token: str, text: bytes) -> bytes:
    return hmac.digest(token.encode(), b"persia_torchrec 1 " + text, "sha256")
