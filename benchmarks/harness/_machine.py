"""The machine of the measurements."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "tensorcas-mlflow",
    "mlflow",
    "numpy",
    "torch",
    "safetensors",
    "bintensors",
    "pyarrow",
    "blake3",
    "zstandard",
    "zipnn",
)


def describe_machine(scratch: Path) -> dict[str, str]:
    """Describe this machine and its software versions, by topic."""
    return {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "file system": _file_system(scratch),
        "system": f"{platform.system()} {platform.release().split('-')[0]}, Python {platform.python_version()}",
        "packages": ", ".join(f"{name} {version}" for name in PACKAGES if (version := _version(name)) is not None),
        "commit": _commit(),
    }


def _processor() -> str:
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.machine()


def _file_system(folder: Path) -> str:
    """The kind of the file system with the longest mount point above the folder."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    above = [(mount[1], mount[2]) for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    return max(above, key=lambda mount: len(mount[0]))[1] if above else "unknown"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    try:
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
