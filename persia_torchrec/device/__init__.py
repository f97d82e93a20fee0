"""What stands between host and GPU: batches as tensors, pinned memory, streams."""
