"""Make an environment from pins, in one folder, anew only when those change: the developer's, with this checkout, or a benchmark's."""

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
DEVELOPER = "dev"


def pins(kind: str) -> Path:
    """The file that says what is in an environment of this kind."""
    return ROOT / "requirements" / f"{kind}.txt"


def wanted(folder: Path, kind: str) -> str:
    """A digest of all that an environment is made from; the same digest, the same environment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    made_from = [
        pins(kind).read_text(encoding="utf-8"),
        *([project["build-system"], project["project"]] if kind == DEVELOPER else []),
        str(folder),  # scripts in an environment name its folder, so one that was moved is of no use
        sys.executable,
        sys.version,
    ]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()


def make(folder: Path, kind: str) -> None:
    """Make `folder` from nothing; this checkout is in the developer's alone. Downloads happen here and nowhere else."""
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
    run(*install, "--require-hashes", "--only-binary", ":all:", "-r", str(pins(kind)))
    if kind == DEVELOPER:
        run(*install, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))


def run(*command: str) -> None:
    if code := subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL).returncode:
        sys.exit(
            f"the environment is not ready, the next make starts it again: exit code {code} of {' '.join(command)}"
        )


def main(name: str, kind: str = DEVELOPER) -> None:
    folder = ROOT / name
    stamp = folder / ".made-from"
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two makes at once: the second waits and finds it done
        digest = wanted(folder, kind)
        if stamp.exists() and stamp.read_text(encoding="utf-8") == digest:
            return
        print(f"making {name} for Python {sys.version.split()[0]}", flush=True)
        stamp.unlink(missing_ok=True)
        make(folder, kind)
        stamp.write_text(digest, encoding="utf-8")  # last: an environment without it was interrupted


if __name__ == "__main__":
    main(*sys.argv[1:])
