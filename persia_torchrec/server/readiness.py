"""How a server process says that it is ready."""

import sys


def tell_ready(address: str) -> None:
    """Write the line that whoever started the process waits for."""
    sys.stdout.write(f"ready {address}\n")
    sys.stdout.flush()
