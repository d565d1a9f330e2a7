"""Make the developer's environment: the pinned tools and this checkout, in one folder, anew only when those change."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "requirements" / "dev.txt"


def wanted(folder: Path) -> str:
    """A digest of all that an environment is made from; the same digest, the same environment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    made_from = [
        PINS.read_text(encoding="utf-8"),
        project["build-system"],
        project["project"],
        str(folder),  # scripts in an environment name its folder, so one that was moved is of no use
        sys.executable,
        sys.version,
    ]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()


def make(folder: Path) -> None:
    """Make `folder` from nothing. Downloads happen here and nowhere else."""
    if uv := shutil.which("uv"):
        run(uv, "venv", "--quiet", "--clear", "--no-project", "--python", sys.executable, str(folder))
        install = [uv, "pip", "install", "--quiet", "--python", str(folder / "bin" / "python")]
    else:
        if importlib.util.find_spec("ensurepip") is None:
            sys.exit(
                f"{sys.executable} cannot make environments: it comes without ensurepip.\n"
                "On Debian and Ubuntu: apt-get install python3-venv. Or put uv on the PATH, or call make with PYTHON=..."
            )
        run(sys.executable, "-m", "venv", "--clear", str(folder))
        install = [str(folder / "bin" / "python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    run(*install, "--require-hashes", "--only-binary", ":all:", "-r", str(PINS))
    run(*install, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))


def run(*command: str) -> None:
    if code := subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL).returncode:
        sys.exit(
            f"the environment is not ready, the next make starts it again: exit code {code} of {' '.join(command)}"
        )


def main(name: str) -> None:
    folder = ROOT / name
    stamp = folder / ".made-from"
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two makes at once: the second waits and finds it done
        digest = wanted(folder)
        if stamp.exists() and stamp.read_text(encoding="utf-8") == digest:
            return
        print(f"making {name} for Python {sys.version.split()[0]}", flush=True)
        stamp.unlink(missing_ok=True)
        make(folder)
        stamp.write_text(digest, encoding="utf-8")  # last: an environment without it was interrupted


if __name__ == "__main__":
    main(*sys.argv[1:])
