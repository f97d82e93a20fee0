"""Default timeouts in seconds: the deadlines that an operator may meet in an error.

Heartbeats, and how long a job waits for members to join and to leave, are flags of the
coordinator.
"""

JOIN_S = 120.0  # a process finds the job's coordinator
DISCOVERY_S = 600.0  # all servers, embedding workers and trainers have registered
RENDEZVOUS_S = 120.0  # all trainers are at the rendezvous of their process group
READY_S = 600.0  # servers have loaded their checkpoint, the workers over them answer
REQUEST_S = 60.0  # a server answers a worker, a worker an inference server
TRAINING_REQUEST_S = 120.0  # a server or a worker answers a trainer
ADD_TABLES_S = 120.0  # the servers have all tables; the first time they compile
PERMIT_S = 3600.0  # a staleness permit is free: the trainer takes steps meanwhile
SEND_BATCH_S = 900.0  # a loader's batch is taken; full buffers make it wait
JOINT_UPDATE_S = 600.0  # all trainers have sent their gradients of a joint step
COMPILING_S = 900.0  # the longest extension while a process compiles its loops
CHECKPOINT_S = 3600.0  # all servers have written or loaded a checkpoint
