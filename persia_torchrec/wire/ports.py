"""TCP ports of this machine."""

import socket


def free_port(address: str = "127.0.0.1") -> int:
    """Return a TCP port that nobody listens on at this moment.

    Another process may take it before the caller does: whoever can listen on port 0
    and tell the port afterwards should do that instead.

    Args:
        address: the interface's IP address, or an empty string for all of them.

    Example:
        >>> free_port() > 0
        True
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
