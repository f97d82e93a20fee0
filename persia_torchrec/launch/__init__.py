"""Starting a job: the roles for torchx, the coordinator, the user's scripts."""
