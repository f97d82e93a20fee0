"""The names of the door, and where they are; see the package's own stub."""

from persia_torchrec.persia.k8s_utils import (
    INSTEAD as INSTEAD,
    NO_NATS as NO_NATS,
    PORT as PORT,
    Block as Block,
    Converted as Converted,
    NNWorkerBlock as NNWorkerBlock,
    PersiaEnv as PersiaEnv,
    PersiaJob as PersiaJob,
    Spec as Spec,
    Variable as Variable,
    main as main,
    parser as parser,
)
