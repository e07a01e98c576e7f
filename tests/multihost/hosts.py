"""Two hosts on one machine: network namespaces with a link between them, and `torchrun` in each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
RANKS_PER_HOST = 2
_NETNS_ETC = Path("/etc/netns")
_FIRST_HOST = "xd-first-host"
_PORT = 29511  # free: the namespaces are new


def why_not() -> str | None:
    """Why namespaces cannot be made here; None if they can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if shutil.which("ip") is None:
        return "the ip tool is not installed (package iproute2)"
    name = f"xd-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return f"ip netns add: {made.stderr.strip()}"
    entered = subprocess.run(["ip", "netns", "exec", name, "true"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], check=False)
    return None if entered.returncode == 0 else f"ip netns exec: {entered.stderr.strip()}"


class TwoHosts:
    """Hosts 0 and 1, at 10.77.0.1 and 10.77.0.2; global ranks 0 and 1 live on the first, 2 and 3 on the second.

    The first host knows its own name as a loopback address, as many distributions set it up: what leads to the store
    there would lead the other host's ranks to themselves.
    """

    def __init__(self) -> None:
        self.names = [f"xd-{os.getpid()}-{host}" for host in range(2)]
        self.links = [f"xd{os.getpid()}{'ab'[host]}" for host in range(2)]

    def connect(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
            folder = _NETNS_ETC / name  # laid over /etc by `ip netns exec`
            folder.mkdir(parents=True)
            own = "127.0.1.1" if name == self.names[0] else "10.77.0.1"
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{own} {_FIRST_HOST}\n")
        first, second = self.links
        _ip("link", "add", first, "netns", self.names[0], "type", "veth", "peer", second, "netns", self.names[1])
        for host, (name, link) in enumerate(zip(self.names, self.links, strict=True)):
            _ip("-n", name, "addr", "add", f"10.77.0.{host + 1}/24", "dev", link)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", link, "up")

    def cut(self) -> None:
        """Take the first host off the network."""
        _ip("-n", self.names[0], "link", "set", self.links[0], "down")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(_NETNS_ETC / name, ignore_errors=True)

    def torchrun(self, host: int, script: Path, arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """`torchrun` of this host's ranks, in a process group of its own."""
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={RANKS_PER_HOST}"]
        meeting = [f"--node-rank={host}", f"--master-addr={_FIRST_HOST}", f"--master-port={_PORT}"]
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path])
        environment = os.environ | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": self.links[host], "OMP_NUM_THREADS": "1"}
        command = ["ip", "netns", "exec", self.names[host], *launcher, *meeting, str(script), *arguments]
        with log.open("wb") as output:
            return subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    hosts = TwoHosts()
    try:
        hosts.connect()
        yield hosts
    finally:
        hosts.remove()


@contextmanager
def running(
    hosts: TwoHosts, script: Path, arguments: Sequence[str], logs: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Both hosts' `torchrun`; at the end their process groups are killed."""
    launchers: list[subprocess.Popen[bytes]] = []
    try:
        for host in range(2):
            launchers.append(hosts.torchrun(host, script, arguments, logs / f"host{host}.log"))
        yield launchers
    finally:
        for launcher in launchers:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
