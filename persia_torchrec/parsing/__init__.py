"""Command lines, YAML files and JSON as settings, with errors that name the key."""
