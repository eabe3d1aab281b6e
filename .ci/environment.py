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
HAS_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
LOOK_S = 120.0
"""For pip's answer what it would fetch; the installation says what is wrong, if anything is."""
CUDA_GB, CPU_GB = 2.5, 0.2
"""Sizes of torch 2.13.0 and what it needs on x86-64, in 10^9 bytes: 12 wheels of CUDA seen on 2026-11-25; one for CPUs."""
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


def announce_torch(folder: Path) -> bool:
    """Say which build of torch pip is about to fetch for an environment, and how much; whether it is the large one, for CUDA.

    Which one it is follows from pip's settings: pip prefers a CPU build of the exact version wherever they lead to one.
    """
    python = str(folder / "bin" / "python")
    known = subprocess.run([python, "-c", HAS_TORCH], capture_output=True, text=True, check=False)
    wanted = re.search(r"(?m)^torch==.*$", (folder / "constraints.txt").read_text())
    if known.returncode == 0 or wanted is None:
        return False
    asked = [python, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-", wanted[0].strip()]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=LOOK_S)
        found = {one["metadata"]["name"].lower(): one["metadata"]["version"] for one in json.loads(done.stdout)["install"]}
    except (subprocess.TimeoutExpired, ValueError, LookupError, TypeError):  # an old pip, or nothing to be had, or no answer
        return False
    is_large = any(name.startswith("nvidia-") for name in found)
    has_gpu = shutil.which("nvidia-smi") is not None or NVIDIA_DRIVER.exists()
    sys.stderr.write(text_of_download(found, is_large=is_large, has_gpu=has_gpu))
    return is_large


def text_of_download(found: dict[str, str], *, is_large: bool, has_gpu: bool) -> str:
    """What is fetched, and what to do where the build does not fit the machine. ``found``: version by package."""
    build, gb = ("with CUDA", CUDA_GB) if is_large else ("a CPU build", CPU_GB)
    text = f"pip fetches torch {found.get('torch', '')}, {build}: {len(found)} packages, about {gb} GB (once)\n"
    if is_large and not has_gpu:
        text += (
            f"  There is no GPU here: a rehearsal needs a CPU build, about {CPU_GB} GB. pip takes one if its settings lead\n"
            "  to it: end this (Ctrl-C), set PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS to CPU builds of torch, and start again.\n"
        )
    if has_gpu and not is_large:
        text += "  There is a GPU here, which a CPU build cannot measure: it will be a rehearsal. See PIP_EXTRA_INDEX_URL.\n"
    return text


def hand_over(arguments: list[str]) -> NoReturn:
    """Become the nox of the environment."""
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(f"Python 3.10 or newer is needed; {sys.executable} is {VERSION}")
    sys.stdout.flush()
    python = str(environment() / "bin" / "python")
    os.execv(python, [python, "-m", "nox", "--noxfile", str(ROOT / "noxfile.py"), *arguments])  # noqa: S606 -- no shell is the point
