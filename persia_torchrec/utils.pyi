"""The names of the door, and where they are; see the package's own stub."""

from persia_torchrec.persia.utils import (
    MAXIMUM_LOCAL_PORT_NUM as MAXIMUM_LOCAL_PORT_NUM,
    MAX_SEED as MAX_SEED,
    dump_yaml as dump_yaml,
    find_free_port as find_free_port,
    get_embedding_worker_services as get_embedding_worker_services,
    load_yaml as load_yaml,
    resolve_binary_execute_path as resolve_binary_execute_path,
    run_command as run_command,
    setup_seed as setup_seed,
)
