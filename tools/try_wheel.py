"""Build the wheel, install it into an empty environment, and try there what a user tries first; given a folder, leave it there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "agent_run_ledger"


def build(folder: Path) -> Path:
    """The wheel, made by the pinned build backend without asking any index."""
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder), cwd=ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


def left_out(wheel: Path) -> list[str]:
    """Files of the package, py.typed and data among them, that the wheel does not hold."""
    packed = set(zipfile.ZipFile(wheel).namelist())
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sorted(name for path in files if (name := path.relative_to(PACKAGE.parent).as_posix()) not in packed)


def install(wheel: Path, folder: Path) -> Path:
    """An environment that holds nothing but the wheel; returns its folder of commands."""
    bin_folder = folder / "bin"
    if uv := shutil.which("uv"):
        run(uv, "venv", "--quiet", "--no-project", "--python", sys.executable, str(folder), cwd=folder.parent)
        installer = [uv, "pip", "install", "--quiet", "--python", str(bin_folder / "python")]
    else:
        run(sys.executable, "-m", "venv", str(folder), cwd=folder.parent)
        installer = [str(bin_folder / "python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    run(*installer, "--no-index", str(wheel), cwd=folder.parent)  # no index: it needs nothing else, or this fails
    return bin_folder


def run(*command: str, cwd: Path) -> None:
    print("$", *command, flush=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run(command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, check=True)


def main(kept: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build(folder)
        if missing := left_out(wheel):
            sys.exit(f"{wheel.name} leaves out: {', '.join(missing)}")
        commands = install(wheel, Path(kept).absolute() if kept else folder / "empty")
        run(str(commands / "python"), "-I", "-c", "import agent_run_ledger", cwd=folder)
        run(str(commands / "agent-run-ledger"), "--help", cwd=folder)
        run(str(commands / "agent-run-ledger"), "demo", cwd=folder)
        print(f"{wheel.name} builds, installs into an empty environment and works there")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except subprocess.CalledProcessError as failed:
        sys.exit(f"exit code {failed.returncode} of {' '.join(failed.cmd)}")
