"""The two YAML files of a job, read into frozen structs.

``embedding_config.yml`` says which features are embedded and how,
``global_config.yml`` what the servers and embedding workers may use. Their keys and
defaults are PERSIA's. Unlike PERSIA, this package rejects unknown keys, duplicate keys
and values of another type; ``differences.toml`` lists the exceptions.
"""
