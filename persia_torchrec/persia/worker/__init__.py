"""The embedding worker as a process of its own."""
