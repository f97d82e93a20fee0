"""Roles of a job for torchx, the only modules of the package that import it."""
