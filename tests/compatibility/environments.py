"""Libraries of images old and new, with the trainer's package of this checkout: one virtual environment for each.

    python -m tests.compatibility.environments [NAME ...]

makes them in `.tools/compatibility`. Without names: all, but those whose Python is not on the PATH.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_FOLDER: Final = ROOT / ".tools" / "compatibility"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """One row of the table in docs/compatibility.md."""

    python: str
    protobuf: str
    grpcio: str

    @property
    def name(self) -> str:
        return f"python{self.python}-protobuf{self.protobuf}-grpcio{self.grpcio}"

    @property
    def interpreter(self) -> Path:
        return _FOLDER / self.name / "bin" / "python"

    def make(self) -> None:
        """Make it, unless it is there. Raises subprocess.CalledProcessError."""
        done = _FOLDER / self.name / ".ready"
        if done.exists():
            return
        subprocess.run([self._python_found() or "", "-m", "venv", "--clear", _FOLDER / self.name], check=True)
        pins = [f"protobuf=={self.protobuf}", f"grpcio=={self.grpcio}"]
        subprocess.run(
            [self.interpreter, "-m", "pip", "install", "--quiet", *pins, "--editable", ROOT], check=True, cwd=ROOT
        )
        done.touch()

    def python_is_there(self) -> bool:
        """Whether a program of that name is found and runs: it may be a stand-in for one that is not installed."""
        found = self._python_found()
        return found is not None and not subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode

    def _python_found(self) -> str | None:
        # Whoever runs the tests can run this Python, and perhaps not the one on the PATH of who makes the environments.
        own = f"{sys.version_info.major}.{sys.version_info.minor}" == self.python
        return sys.executable if own else shutil.which(f"python{self.python}")


ENVIRONMENTS: Final = (
    Environment(python="3.10", protobuf="3.20.3", grpcio="1.48.2"),
    Environment(python="3.10", protobuf="4.25.3", grpcio="1.60.0"),
    Environment(python="3.11", protobuf="3.20.3", grpcio="1.49.1"),
    Environment(python="3.11", protobuf="5.29.5", grpcio="1.66.2"),
    Environment(python="3.11", protobuf="7.36.2", grpcio="1.85.1"),
    Environment(python="3.12", protobuf="6.31.1", grpcio="1.74.0"),
    Environment(python="3.13", protobuf="7.36.2", grpcio="1.85.1"),
)
"""By Python, the oldest first. grpcio has no wheels for 3.11 before 1.49.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkEnvironment:
    """Older releases of frameworks on this Python and the tests' own libraries; `tests`: those that are run there.

    `environment`: what a user of these releases would set to load checkpoints at all.
    """

    name: str
    packages: tuple[str, ...]
    tests: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def interpreter(self) -> Path:
        return _FOLDER / self.name / "bin" / "python"

    def make(self) -> None:
        """Make it, unless it is there. Raises subprocess.CalledProcessError."""
        folder = _FOLDER / self.name
        wanted = "\n".join(self.packages)
        ready = folder / ".ready"
        if ready.exists() and ready.read_text() == wanted:
            return
        theirs = _THEIRS if not any(package.startswith("torch==") for package in self.packages) else _THEIRS + _TORCH
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (folder / "base").mkdir()
        for found in Path(sysconfig.get_path("purelib")).iterdir():
            if not found.name.lower().startswith(theirs):
                (folder / "base" / found.name).symlink_to(found)
        own = (ROOT / name for name in ("client", "proto", "agent"))
        (site / "base.pth").write_text("".join(f"{path}\n" for path in (folder / "base", *own)))
        # DeepSpeed imports torch to be built, and compiles nothing here.
        install = [str(self.interpreter), "-m", "pip", "install", "--quiet", "--no-build-isolation"]
        environment = {**os.environ, "DS_BUILD_OPS": "0"}
        for packages in (_TO_BUILD, self.packages[:1], self.packages):
            subprocess.run([*install, *packages], env=environment, check=True)
        # Some distributions bring a package of this name, which would hide ours.
        shutil.rmtree(site / "tests", ignore_errors=True)
        ready.write_text(wanted)


# Frameworks, and what comes with a release of them; pip and what our own packages are found by.
_THEIRS: Final = (
    *("accelerate", "datasets", "deepspeed", "hf_xet", "huggingface_hub", "lightning", "pytorch_lightning"),
    *("peft", "tokenizers", "torchmetrics", "transformers", "trl", "pip", "_keepstep", "__editable__", "keepstep"),
)
_TORCH: Final = ("torch", "functorch", "triton", "nvidia")
_TO_BUILD: Final = ("setuptools", "wheel", "ninja", "packaging", "py-cpuinfo", "psutil")
_HUGGING_FACE: Final = ("hugging_face_trainer", "test_hugging_face_killed.py")
_ALL: Final = (
    *_HUGGING_FACE,
    "test_hugging_face_trl.py",
    "lightning_trainer",
    "test_accelerate.py",
    "test_deepspeed.py",
)
FRAMEWORKS: Final = (
    FrameworkEnvironment(
        name="hugging-face-2024",
        packages=("transformers==4.44.2", "accelerate==1.0.1"),
        tests=_HUGGING_FACE,
        # As the torch of that day did, which this release relies on to load what it has saved.
        environment=(("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1"),),
    ),
    FrameworkEnvironment(
        name="image-2024",
        packages=(
            *("torch==2.4.1", "torchdata==0.11.0", "transformers==4.46.3", "accelerate==1.0.1", "trl==0.12.2"),
            *("lightning==2.2.5", "deepspeed==0.15.4"),
        ),
        tests=_ALL,
    ),
    FrameworkEnvironment(
        name="frameworks-2025",
        packages=(
            *("transformers==4.51.3", "accelerate==1.6.0", "trl==0.17.0", "lightning==2.5.1"),
            *("deepspeed==0.17.6", "torchdata==0.11.0"),
        ),
        tests=_ALL,
    ),
)
"""The oldest first. torch 2.4 has no build without CUDA on PyPI: image-2024 takes five gigabytes."""


def main() -> None:
    wanted = sys.argv[1:]
    for environment in FRAMEWORKS:
        if not wanted or environment.name in wanted:
            environment.make()
    for client in ENVIRONMENTS:
        if wanted and client.name not in wanted:
            continue
        if client.python_is_there():
            client.make()
        else:
            print(f"there is no python{client.python} on the PATH: {client.name} is left out")


if __name__ == "__main__":
    main()
