"""The process that runs programs, seen from the tests: it may crash or hang, and is started again."""

import json
import pathlib
import select
import subprocess
import sys
import tempfile
from typing import Any

from programs import Spec

WORKER = pathlib.Path(__file__).with_name("worker.py")
SECONDS = 300.0  # some need 20 on a busy machine


class Client:
    """`answer` gives a worker's answer to a spec, or `{"died": how, "stderr": the last lines}`."""

    def __init__(self, seconds: float = SECONDS):
        self._seconds = seconds
        self._process: subprocess.Popen[str] | None = None
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._known: dict[str, dict[str, Any]] = {}  # hypothesis asks again about what has failed

    def answer(self, spec: Spec) -> dict[str, Any]:
        line = json.dumps(spec)
        if line not in self._known:
            self._known[line] = self._ask(line)
        return self._known[line]

    def close(self) -> None:
        """Ends the worker."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ask(self, line: str) -> dict[str, Any]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stderr.seek(0)
        self._stderr.truncate()
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        in_time = bool(select.select([self._process.stdout], [], [], self._seconds)[0])
        text = self._process.stdout.readline() if in_time else ""
        if text:
            return json.loads(text)
        how = f"status {self._process.wait()}" if in_time else f"no answer in {self._seconds:.0f} s"
        self.close()
        self._stderr.seek(0)
        return {"died": how, "stderr": self._tail()}

    def _tail(self) -> list[str]:
        """Return the layout at the time, the failure, and the end of the output."""
        lines = self._stderr.read().splitlines()
        layouts = [line for line in lines if line.startswith("layout ")]
        checks = [line for line in lines if "Check failed" in line or "Error" in line or "free()" in line]
        return [*layouts[-1:], *checks[:3], *lines[-3:]]
