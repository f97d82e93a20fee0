"""The rendezvous of the trainers: the variables that ``torch.distributed`` reads.

A trainer's rank is its replica index. Its local rank is its position among the
trainers that name the same host, so that each takes a device of its own. Trainer 0
names the address and port at which the process group meets.
"""

import socket

from persia_torchrec import env
from persia_torchrec.errors import ConfigError
from persia_torchrec.wire.discovery import AddressBook
from persia_torchrec.wire.ports import free_port, local_address


def set_up_rendezvous(
    book: AddressBook, rank: int, world_size: int, *, timeout_s: float = 120.0
) -> None:
    """Set ``RANK``, ``MASTER_ADDR`` and their kin for this trainer.

    Waits until every trainer of the job has come this far.

    Raises:
        ConfigError: ``rank`` is not in ``[0, world_size)``.
        DiscoveryError: some trainer did not come within ``timeout_s``.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"REPLICA_INDEX must be in [0, {world_size}). Received: {rank}."
        )
    hosts = [f"trainer/{other}/host" for other in range(world_size)]
    book.tell(hosts[rank], socket.gethostname())
    if rank == 0:
        address = local_address(book.host_name)
        book.tell("trainer/master", f"{address} {free_port(address)}")
    *host_names, master = book.ask([*hosts, "trainer/master"], timeout_s=timeout_s)
    address, _, port = master.rpartition(" ")
    variables: dict[str, str | int] = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": host_names[:rank].count(host_names[rank]),
        "LOCAL_WORLD_SIZE": host_names.count(host_names[rank]),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    for name, value in variables.items():
        env.set_env(name, value)
