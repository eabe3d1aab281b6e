"""Makes the environments under .nox/ on a bare machine: needs Python 3.10 or newer and its standard library, nothing else."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
OLDEST_PYTHON = (3, 10)
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
NO_VENV = f"""{sys.executable} cannot make virtual environments: its ensurepip is missing. On Debian and Ubuntu:
  apt install python{VERSION}-venv"""
NO_NOX = """pip could not fetch nox (its message is above). With the dependencies installed, start pytest yourself from here:
  python3 -m pytest -p pytest_gpucluster.plugin tests_acceptance"""
ASK_TORCH = """import json, sys, torch
folders = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
print(json.dumps([torch.__version__, folders]) if torch.cuda.is_available() else "")"""


def environment(name: str = "dev") -> Path:
    """The folder of an environment with nox in it, made on first use; SystemExit says what this Python lacks for it."""
    folder = ROOT / ".nox" / f"{name}-{VERSION}"
    if not (folder / "constraints.txt").exists():  # written last: an interrupted attempt has none
        if importlib.util.find_spec("ensurepip") is None:
            sys.exit(NO_VENV)
        sys.stderr.write(f"making {folder} (once)\n")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        if subprocess.run([*pip, "nox>=2024.10.9", "pip>=21.3"], check=False).returncode != 0:
            sys.exit(NO_NOX)
        (folder / "constraints.txt").write_text(share_torch(folder))
    return folder


def share_torch(folder: Path) -> str:
    """Let an environment see the torch of this Python if that torch sees GPUs; the constraints for pip, with its version."""
    constraints = (ROOT / "constraints.txt").read_text()
    done = subprocess.run([sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode == 0 and done.stdout.strip():
        version, folders = json.loads(done.stdout.splitlines()[-1])
        (folder / "lib" / f"python{VERSION}" / "site-packages" / "host.pth").write_text("\n".join(folders) + "\n")
        return re.sub(r"(?m)^torch==.*$", f"torch=={version}", constraints)
    if shutil.which("nvidia-smi"):
        sys.stderr.write(f"nvidia-smi is here, but no torch of {sys.executable} sees a GPU: a torch will be installed\n")
    return constraints


def hand_over(arguments: list[str]) -> NoReturn:
    """Become the nox of the environment."""
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(f"Python 3.10 or newer is needed; {sys.executable} is {VERSION}")
    sys.stdout.flush()
    python = str(environment() / "bin" / "python")
    os.execv(python, [python, "-m", "nox", "--noxfile", str(ROOT / "noxfile.py"), *arguments])  # noqa: S606 -- no shell is the point
