"""An embedding server as a member of a job: registered, watched, ended with it."""

from collections.abc import Callable

from persia_torchrec import env
from persia_torchrec.errors import ConfigError
from persia_torchrec.server.readiness import tell_ready
from persia_torchrec.server.readings import serve_and_push
from persia_torchrec.server.server import EmbeddingServer
from persia_torchrec.wire.greeting import Greeting
from persia_torchrec.wire.membership import JobMember
from persia_torchrec.wire.ports import local_address


def serve_in_job(
    shard: int,
    num_shards: int,
    make_server: Callable[[str, Greeting, Callable[[bool], object]], EmbeddingServer],
) -> None:
    """Serve until the job ends.

    The process joins the job before anything can go wrong, so that the others learn
    of it.

    Args:
        shard: which server this is.
        num_shards: how many there are.
        make_server: given the address to listen on, the job's greeting, and whom to
            tell that it compiles, returns the server.

    Raises:
        ConfigError: the environment names no job.
        DiscoveryError: the job's address book does not answer.
        JobMismatchError: another job is there, or another process has this place.
        JobError: the job failed elsewhere.
        CheckpointError: the server is to serve a checkpoint, which cannot be loaded.
    """
    store = env.job_store()
    if store is None:
        raise ConfigError(
            "A server must know its job: PERSIA_STORE_PORT is not set. Start it "
            "through torchx (see components/), or give it a global_config.yml with "
            "job_type: Infer, or pass --standalone."
        )
    with JobMember.join("server", shard, num_shards, store=store) as member:
        host, greeting = local_address(store.host), member.book.greeting
        server = make_server(host, greeting, member.tell_compiling)
        member.call_at_end(server.stop)
        member.book.register("server", shard, num_shards, server.address)
        serve_and_push(server, tell_ready)
