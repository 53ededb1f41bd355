"""Messages between two processes, one line of JSON each, over a connection that stays open.

The kernel closes it when one of them ends, in whatever way.
"""

import contextlib
import json
import socket
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]


class Connection:
    """To one other process."""

    def __init__(self, connected: socket.socket):
        self._socket = connected
        self._received = b""

    def fileno(self) -> int:
        """For `selectors`."""
        return self._socket.fileno()

    def send(self, message: Message, seconds: float = 0.0) -> None:
        """What cannot be sent within `seconds` is lost: the other process is gone or frozen."""
        with contextlib.suppress(OSError):
            self._socket.settimeout(seconds)
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float = 0.0) -> Message | None:
        """The next message; `None` if none comes within `seconds`.

        **Raises:** `OSError` if the connection has ended, `ValueError` at anything but a message.
        """
        self._socket.settimeout(seconds)
        while b"\n" not in self._received:
            try:
                received = self._socket.recv(1 << 16)
            except BlockingIOError:
                return None
            except TimeoutError as error:
                if error.errno is None:  # ours, not the kernel's
                    return None
                raise
            if not received:
                raise ConnectionError("its connection was closed")
            self._received += received
            if not self._received.startswith(b"{"):
                raise ValueError(f"{self._received[:80]!r} is no message")
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def has_ended(self) -> bool:
        """Whether the other process is gone."""
        try:
            self.receive()
            return False
        except (OSError, ValueError):
            return True

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()
