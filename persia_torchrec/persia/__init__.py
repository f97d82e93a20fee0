"""PERSIA's API on the same engine; its import paths are doors to these modules."""
