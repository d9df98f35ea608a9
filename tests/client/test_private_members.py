"""Private members of libraries that the trainer's side uses: the installed releases have them, and a release without
one is named in one line."""

import importlib
import multiprocessing.forkserver
import re
import tomllib
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

import pytest
import torch.distributed

import keepstep
from keepstep.integrations import accelerate, deepspeed
from keepstep.integrations.ownership import protect_new
from keepstep.private_members import PRIVATE_MEMBERS, require
from keepstep.ranks.rank_store import Ranks, open_rank_store
from keepstep.workers import fork_server

_ROOT: Final = Path(__file__).parents[2]


def _made(module: str, name: str, *arguments: Any, **named: Any) -> Any:
    return getattr(importlib.import_module(module), name)(*arguments, **named)


# How to get what is no module.
_FOUND: Final = MappingProxyType(
    {
        "lightning.AsyncCheckpointIO": lambda: _made("lightning.pytorch.plugins.io", "AsyncCheckpointIO"),
        "lightning.ModelCheckpoint": lambda: _made("lightning.pytorch.callbacks", "ModelCheckpoint"),
        "lightning.Trainer": lambda: _made(
            "lightning.pytorch", "Trainer", accelerator="cpu", devices=1, logger=False, enable_checkpointing=False
        ),
        "lightning.callbacks": lambda: _made("lightning.pytorch.callbacks", "LearningRateFinder"),
        "accelerate.Accelerator": lambda: _made("accelerate", "Accelerator", cpu=True),
        "deepspeed.DeepSpeedEngine": lambda: importlib.import_module("deepspeed").DeepSpeedEngine,
        "torch.storage.TypedStorage": lambda: torch.ones(1).storage(),
        "transformers.Trainer before 5": lambda: importlib.import_module("transformers").Trainer,
        "transformers.Trainer": lambda: importlib.import_module("transformers").Trainer,
        "transformers.Trainer since 4.47": lambda: importlib.import_module("transformers").Trainer,
        "transformers.Trainer since 5": lambda: importlib.import_module("transformers").Trainer,
        "transformers.trainer_jit_checkpoint.CheckpointManager": lambda: _made(
            "transformers.trainer_jit_checkpoint", "CheckpointManager", None
        ),
    }
)


@pytest.mark.filterwarnings("ignore")  # theirs, when they are made with nothing to train
@pytest.mark.parametrize("owner", PRIVATE_MEMBERS)
def test_the_installed_releases_have_what_is_used_of_them(owner: str) -> None:
    library = pytest.importorskip(owner.partition(".")[0])
    before = owner.partition(" before ")[2]
    if before and int(library.__version__.partition(".")[0]) >= int(before):
        pytest.skip("the installed release has a public function for it")
    require(owner, _FOUND[owner]() if owner in _FOUND else importlib.import_module(owner))


@pytest.mark.parametrize("owner", PRIVATE_MEMBERS)
def test_a_release_without_one_is_named(owner: str) -> None:
    with pytest.raises(AttributeError, match=rf"^\w+ ?[\w.+]* has no {owner}\.{PRIVATE_MEMBERS[owner][0]}, "):
        require(owner, object())


def test_the_page_lists_every_member_and_the_project_caps_every_library() -> None:
    page = (_ROOT / "docs" / "compatibility.md").read_text()
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    lists = (*project["project"]["optional-dependencies"].values(), *project["dependency-groups"].values())
    caps = {re.split(r"[<>=]", one)[0] for names in lists for one in names if isinstance(one, str) and "<" in one}
    for owner, members in PRIVATE_MEMBERS.items():
        assert [path for path in members if f"`{path.rpartition('.')[2]}`" not in page] == []
        assert owner.partition(".")[0] in caps | {"multiprocessing"}


class Renamed:
    """Has nothing that we know of."""


def test_an_accelerator_that_lacks_one_is_not_protected_and_one_line_says_why(
    capfd: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("accelerate")  # its release is named
    protect_new(Renamed, accelerate.install)
    Renamed()
    said = capfd.readouterr().err
    assert said.startswith("keepstep: Renamed is not protected: AttributeError: accelerate ")
    assert "has no accelerate.Accelerator._models" in said
    assert said.count("\n") == 1


def test_a_deepspeed_that_lacks_one_saves_without_the_client_state_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("deepspeed")  # its release is asked for
    checkpoint_engine = SimpleNamespace(is_decoupled=lambda: False)
    engine = SimpleNamespace(save_checkpoint=None, load_checkpoint=None, checkpoint_engine=checkpoint_engine)
    deepspeed._Training(engine)
    assert "has no deepspeed.DeepSpeedEngine._common_checkpoint_state" in caplog.text


def test_a_python_whose_fork_server_is_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(multiprocessing.forkserver, "_forkserver")
    with pytest.raises(AttributeError, match=r"^Python 3\S* has no multiprocessing\.forkserver\._forkserver"):
        fork_server.keep_alive()


def test_a_torch_whose_store_is_not_found_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.delattr(torch.distributed.distributed_c10d, "_get_default_store")
    with pytest.raises(keepstep.UsageError, match=r"torch \S+ has no .*\._get_default_store"):
        open_rank_store(Ranks(world_size=2), "any")
