"""The names of the door, and where they are; see the package's own stub."""
