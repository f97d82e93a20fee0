"""A network of hosts on this machine, each a set of namespaces, and the switch between.

    python -S tests/support/switch.py 3

makes the hosts 10.77.0.1 to 10.77.0.3, for any user to whom the kernel grants
namespaces. Each has an interface, a process table and a name of its own. The number of
its first process is printed, whose namespaces others may join; all ends with standard
input.

The interfaces are TUN devices, so that this process passes each packet on, and can do
with it what a network does. It answers a line of standard input by a line:

    cut 1          host 1 gets nothing from others, and they nothing from it
    mend 1         it does again
    delay 0.005    seconds that a packet takes from now on, in each direction
"""

import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from pathlib import Path

USER, NET, MOUNT, PROCESSES, NAME = 2**28, 2**30, 2**17, 2**29, 2**26  # CLONE_NEW...
OF_HOST = NET | MOUNT | PROCESSES | NAME

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
_SET_ADDRESS, _SET_NETMASK, _SET_FLAGS, _SET_MTU = 0x8916, 0x891C, 0x8914, 0x8922
_UP = 1
_MTU = 65_000  # few packets: each costs this process some time
_NETWORK = "10.77.0."
_COMMANDS = 0  # standard input


def call(name, *arguments):
    """Call a function of the C library, or raise OSError."""
    if getattr(_LIBC, name)(*arguments):
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def end_with_parent():
    """Have the kernel kill this process when its parent ends."""
    call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL)


def address_of(host):
    """Return the address of a host."""
    return f"{_NETWORK}{host + 1}"


def become_root():
    """Enter a user namespace in which this user may do everything."""
    uid, gid = os.getuid(), os.getgid()
    call("unshare", USER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def start_host(host):
    """Start a host; return the number of its first process, and its interface."""
    receiver, sender = socket.socketpair()
    with receiver, sender:
        if os.fork() == 0:
            try:
                _be_host(host, sender)
            except OSError as exc:
                sender.send(str(exc).encode())
            os._exit(1)
        text, interfaces, _, _ = socket.recv_fds(receiver, 200, 1)
    if not interfaces:
        raise SystemExit(text.decode())
    return int(text), interfaces[0]


def _be_host(host, sender):
    end_with_parent()
    call("unshare", OF_HOST)
    socket.sethostname(f"host-{host}")
    interface = _open_interface(address_of(host))
    reader, writer = os.pipe()
    first = os.fork()  # the first in the new process table
    if first == 0:
        end_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for orphans
        call("mount", b"proc", b"/proc", b"proc", 0, None)
        os.write(writer, b".")
        while True:
            signal.pause()
    os.close(writer)
    if os.read(reader, 1):
        socket.send_fds(sender, [str(first).encode()], [interface])
    os.waitpid(first, 0)


def _open_interface(address):
    interface = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", b"net0", _TUN_WITHOUT_HEADER)
    fcntl.ioctl(interface, _TUNSETIFF, request)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for number, text in ((_SET_ADDRESS, address), (_SET_NETMASK, "255.255.255.0")):
            value = struct.pack("=H2x4s8x", socket.AF_INET, socket.inet_aton(text))
            fcntl.ioctl(control, number, struct.pack("16s16s8x", b"net0", value))
        fcntl.ioctl(control, _SET_MTU, struct.pack("16si20x", b"net0", _MTU))
        for name in (b"net0", b"lo"):
            fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sH22x", name, _UP))
    return interface


class Switch:
    """Passes packets on between interfaces, in one thread."""

    def __init__(self, interfaces):
        self._interfaces = interfaces
        self._is_cut = set()
        self._delay_s = 0.0
        self._under_way = deque()  # when a packet is there, from where, to where, it

    def run(self):
        """Pass packets on, and do what is asked for, until no request is left."""
        ready = []
        while _COMMANDS not in ready or self._obey(os.read(_COMMANDS, 1000)):
            for host, interface in enumerate(self._interfaces):
                if interface in ready:
                    self._take(host, interface)
            left_s = self._deliver()
            ready, _, _ = select.select([_COMMANDS, *self._interfaces], [], [], left_s)

    def _obey(self, line):
        if not line:
            return False
        word, value = line.split()
        if word == b"delay":
            self._delay_s = float(value)
        elif word == b"cut":
            self._is_cut.add(int(value))
        else:
            self._is_cut.discard(int(value))
        sys.stdout.write("done\n")
        sys.stdout.flush()
        return True

    def _take(self, host, interface):
        try:
            while True:
                packet = os.read(interface, 2**16)
                to = packet[19] - 1  # the last byte of an IPv4 destination
                if packet[0] >> 4 == 4 and to in range(len(self._interfaces)):
                    due_s = time.monotonic() + self._delay_s
                    self._under_way.append((due_s, host, to, packet))
        except BlockingIOError:
            pass

    def _deliver(self):
        """Deliver what is due; return in how many seconds the next packet is."""
        while self._under_way:
            due_s, host, to, packet = self._under_way[0]
            left_s = due_s - time.monotonic()
            if left_s > 0:
                return left_s
            self._under_way.popleft()
            if not self._is_cut & {host, to}:
                os.write(self._interfaces[to], packet)
        return None


def main():
    """Be the switch between as many hosts as the first argument says."""
    end_with_parent()
    try:
        become_root()
        hosts = [start_host(host) for host in range(int(sys.argv[1]))]
    except OSError as exc:
        raise SystemExit(str(exc)) from None
    sys.stdout.write(" ".join(str(first) for first, _ in hosts) + "\n")
    sys.stdout.flush()
    Switch([interface for _, interface in hosts]).run()


if __name__ == "__main__":
    main()
