"""Start processes, and wait for them by what they do, not by the clock. Not a test.

A process that hangs uses no processor time, and one that loops uses too much of it.
One on a loaded machine does neither.
"""

import socket
import subprocess
import time
from collections.abc import Callable

import psutil

WORK = 300.0  # seconds of processor time that a process of the tests may use
REST = 300.0  # seconds in which it has to use some

# A shell may have started the tests with Ctrl-C ignored, which children inherit.
MUPAX = (
    "import signal, sys\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from mupax.__main__ import main\n"
    "sys.exit(main())\n"
)


def pair_flags() -> list[list[str]]:
    """The flags of two processes of this machine that work together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = ["--distributed", f"--coordinator=127.0.0.1:{port}", "--processes=2"]
    return [[*both, f"--process={rank}"] for rank in range(2)]


class Patience:
    """Fails a test when a process has hung, or works for too long.

    Args:
      child: the process.
    """

    def __init__(self, child: subprocess.Popen):
        self._child = child
        self._used, self._since = 0.0, time.monotonic()

    def check(self) -> None:
        """Raise AssertionError if the process has hung or works for too long."""
        used = processor_seconds(self._child.pid)
        if used is None:
            return  # it has ended
        now = time.monotonic()
        if used > self._used + 0.05:
            self._used, self._since = used, now
        assert used < WORK, f"still at work after {used:.0f} s of processor time"
        assert now - self._since < REST, f"did nothing for {now - self._since:.0f} s"


def processor_seconds(pid: int) -> float | None:
    """Processor time of a process, in seconds; None if it has ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return times.user + times.system


def ended(child: subprocess.Popen) -> tuple[str, str]:
    """Wait for the end of a process; what it wrote to stdout and stderr."""
    patience = Patience(child)
    while True:
        try:
            return child.communicate(timeout=1)
        except subprocess.TimeoutExpired:
            patience.check()


def wait_until(happened: Callable[[], bool], child: subprocess.Popen) -> None:
    """Wait until something has happened that a process brings about."""
    patience = Patience(child)
    while not happened():
        assert child.poll() is None, child.communicate()
        patience.check()
        time.sleep(0.02)
