"""Bytes on disk: shard files, manifests, and the folders that they are in."""
