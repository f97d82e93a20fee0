"""The TorchRec side: sharders, sharded modules."""
