"""The two YAML files of a job as frozen structs, with PERSIA's keys and defaults."""
