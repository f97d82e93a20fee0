"""Default timeouts in seconds: the deadlines that an operator may meet in an error.

Heartbeats, and how long a job waits for members to join and to leave, are flags of the
coordinator. Polling intervals, and deadlines within which threads end, are in the
modules that use them.
"""

JOIN_S = 120.0
"""A process finds the job's coordinator."""

DISCOVERY_S = 600.0
"""All servers, embedding workers and trainers of a job have registered."""

RENDEZVOUS_S = 120.0
"""All trainers have come to the rendezvous of their process group."""

READY_S = 600.0
"""Servers have loaded their checkpoint, and the workers over them answer."""

REQUEST_S = 60.0
"""A server answers a worker, and a worker an inference server."""

TRAINING_REQUEST_S = 120.0
"""A server or a worker answers a trainer."""

ADD_TABLES_S = 120.0
"""The servers have created, or changed, all tables; the first time they compile."""

PERMIT_S = 3600.0
"""A staleness permit becomes free: the trainer takes its steps meanwhile."""

SEND_BATCH_S = 900.0
"""A worker and a trainer take a batch of a data loader; full buffers make it wait."""

JOINT_UPDATE_S = 600.0
"""All trainers have sent their gradients of a joint step."""

COMPILING_S = 900.0
"""By how much a deadline is extended at most while a process compiles its loops."""

CHECKPOINT_S = 3600.0
"""All servers have written or loaded a checkpoint."""
