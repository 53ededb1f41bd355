"""Two hosts on one machine: network namespaces that a pair of virtual Ethernet devices
joins. Needs root."""

import os
import pathlib
import shutil
import subprocess

ADDRESSES = ("10.200.0.1", "10.200.0.2")


def missing():
    """Return the missing requirements, as a sentence; empty if there are none."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    return lacking(("ip", "unshare", "mount"), "iproute2 util-linux")


def lacking(tools, packages):
    absent = [tool for tool in tools if shutil.which(tool) is None]
    return (
        f"{', '.join(absent)} not found (apt-get install {packages})" if absent else ""
    )


class TwoHosts:
    """While entered, two hosts, each with its own name, network and hosts file."""

    def __init__(self, directory: pathlib.Path, names=("n0", "n1")):
        self.names = names
        self._spaces = [f"rx{os.getpid()}{letter}" for letter in "ab"]
        self._devices = [f"rx{os.getpid()}{i}" for i in range(2)]
        self._hosts = [directory / f"hosts.{name}" for name in names]
        self.write_hosts_files()

    def __enter__(self):
        try:
            for space in self._spaces:
                ip("netns", "add", space)
                ip("-n", space, "link", "set", "lo", "up")
            (a, b), (x, y) = self._spaces, self._devices
            peer = ("peer", "name", y, "netns", b)
            ip("link", "add", x, "netns", a, "type", "veth", *peer)
            for space, device, address in zip(self._spaces, self._devices, ADDRESSES):
                ip("-n", space, "addr", "add", f"{address}/24", "dev", device)
                ip("-n", space, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for space in self._spaces:
            subprocess.run(
                ["ip", "netns", "del", space], stderr=subprocess.DEVNULL, check=False
            )

    def command(self, host, *command):
        """`command` on host number `host`: by `exec` all the way, so that it keeps its
        process id."""
        script = (
            f"hostname {self.names[host]}; mount --bind {self._hosts[host]} "
            '/etc/hosts; exec "$@"'
        )
        inside = ["unshare", "--uts", "--mount", "bash", "-c", script, "_"]
        inside += map(str, command)
        return ["ip", "netns", "exec", self._spaces[host], *inside]

    def write_hosts_files(self, wrong=None):
        """Good ones; but host number `wrong` knows itself as Debian's installer writes
        it."""
        for host, file in enumerate(self._hosts):
            lines = ["127.0.0.1 localhost"]
            for i, (address, name) in enumerate(zip(ADDRESSES, self.names)):
                lines.append(f"{'127.0.1.1' if i == host == wrong else address} {name}")
            file.write_text("\n".join([*lines, ""]))

    def set_link(self, up):
        state = "up" if up else "down"
        ip("-n", self._spaces[1], "link", "set", self._devices[1], state)


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True)
