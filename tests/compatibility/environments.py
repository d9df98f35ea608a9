"""Libraries of images old and new, with the trainer's package of this checkout: one virtual environment for each.

    python -m tests.compatibility.environments [NAME ...]

makes them in `.tools/compatibility`. Without names: all, but those whose Python is not on the PATH.
"""

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
    """Older releases of frameworks on this Python, its torch and the tests' own libraries."""

    packages: tuple[str, ...]

    @property
    def name(self) -> str:
        return "-".join(package.replace("==", "") for package in self.packages)

    @property
    def interpreter(self) -> Path:
        return _FOLDER / self.name / "bin" / "python"

    def make(self) -> None:
        """Make it, unless it is there. Raises subprocess.CalledProcessError."""
        folder = _FOLDER / self.name
        if (folder / ".ready").exists():
            return
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (folder / "base").mkdir()
        for found in Path(sysconfig.get_path("purelib")).iterdir():
            if not found.name.lower().startswith(_THEIRS):
                (folder / "base" / found.name).symlink_to(found)
        own = (ROOT / name for name in ("client", "proto", "agent"))
        (site / "base.pth").write_text("".join(f"{path}\n" for path in (folder / "base", *own)))
        subprocess.run([self.interpreter, "-m", "pip", "install", "--quiet", *self.packages], check=True)
        (folder / ".ready").touch()


# Frameworks, and what comes with a release of them; pip and what our own packages are found by.
_THEIRS: Final = (
    *("accelerate", "datasets", "deepspeed", "hf_xet", "huggingface_hub", "lightning", "pytorch_lightning"),
    *("peft", "tokenizers", "torchmetrics", "transformers", "trl", "pip", "_mooring", "__editable__", "mooring"),
)
HUGGING_FACE: Final = FrameworkEnvironment(packages=("transformers==4.44.2", "accelerate==1.0.1"))


def main() -> None:
    wanted = [one for one in ENVIRONMENTS if one.name in sys.argv[1:] or len(sys.argv) == 1]
    if len(sys.argv) == 1:
        HUGGING_FACE.make()
    for environment in wanted:
        if environment.python_is_there():
            environment.make()
        else:
            print(f"there is no python{environment.python} on the PATH: {environment.name} is left out")


if __name__ == "__main__":
    main()
