"""What each process tells the others about itself before JAX joins them."""

import dataclasses
import ipaddress
import os
import socket
import warnings
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Member:
    """One process of a run.

    - `process_id`, `num_processes`: what its launcher told it.
    - `host`, `pid`: the name of its host, and its number there.
    - `address`: what this name resolves to on the host itself; empty if it does not.
    """

    process_id: int
    num_processes: int
    host: str
    pid: int
    address: str

    def __str__(self) -> str:
        return f"process {self.process_id} (host {self.host}, pid {self.pid})"


def this_process(process_id: int, num_processes: int) -> Member:
    """The process that calls this."""
    host = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        address = ""
    return Member(process_id, num_processes, host, os.getpid(), address)


def check_addresses(members: Sequence[Member], platform: str) -> None:
    """Refuses a hosts file that gives a host's name a loopback address, where there are other hosts.

    On CPU each process tells the others to connect to what its own host name resolves to; a line such as
    `127.0.1.1 myhost`, which Debian writes, has them wait for themselves. Raises `RuntimeError` if `platform`
    is `"cpu"`; warns if it is empty, because asking JAX would use its devices.
    """
    if platform not in ("", "cpu") or len({member.host for member in members}) == 1:
        return
    for member in members:
        if member.address and not ipaddress.ip_address(member.address).is_loopback:
            continue
        found = f"resolves to {member.address}, which other hosts cannot reach"
        message = (
            f"initialize_distributed: {member}: the name of this host, {member.host!r}, "
            f"{found if member.address else 'does not resolve'}. On CPU the processes would wait for each "
            f"other in vain. Give {member.host} its address in the network in /etc/hosts (Debian writes "
            f"`127.0.1.1 {member.host}` there)."
        )
        if platform == "cpu":
            raise RuntimeError(message)
        warnings.warn(f"{message} On GPU and TPU this does not matter.", stacklevel=2)
