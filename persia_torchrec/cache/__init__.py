"""Hot rows in the trainer's memory: which row is in which slot."""
