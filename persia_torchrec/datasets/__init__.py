"""Files to batches: columns, row groups, a queue of work, a saved position."""
