"""`keepstep.protect`: what it takes, by the names of classes alone. The frameworks' own tests protect the real ones."""

import sys
from types import ModuleType

import pytest

import keepstep

TAKEN = [
    ("transformers.trainer", "Trainer", "hugging_face"),
    ("lightning.pytorch.trainer.trainer", "Trainer", "lightning"),
    ("pytorch_lightning.trainer.trainer", "Trainer", "lightning"),
    ("accelerate.accelerator", "Accelerator", "accelerate"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "deepspeed"),
]


class Integration(ModuleType):
    """Stands in for one; keeps what it was given."""

    def __init__(self, name: str, error: Exception | None = None) -> None:
        super().__init__(name)
        self.protected: list[object] = []
        self._error = error

    def install(self, x: object) -> None:
        self.protected.append(x)
        if self._error is not None:
            raise self._error


def stand_in(monkeypatch: pytest.MonkeyPatch, integration: str, error: Exception | None = None) -> Integration:
    module = Integration(f"keepstep.integrations.{integration}", error)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def trainer_of(module: str, name: str) -> object:
    """An object of a class that a user derived from the framework's."""
    cls = type(name, (), {"__module__": module, "__qualname__": name})
    return type("Mine", (type("Library", (cls,), {"__module__": "trl.trainer"}),), {})()


@pytest.mark.parametrize(("module", "name", "integration"), TAKEN)
def test_a_frameworks_trainer_is_handed_to_its_integration_and_returned(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, integration: str
) -> None:
    stood_in = stand_in(monkeypatch, integration)
    trainer = trainer_of(module, name)
    assert keepstep.protect(trainer) is trainer
    assert stood_in.protected == [trainer]


@pytest.mark.parametrize("x", [None, 3, trainer_of("somewhere.trainer", "Trainer"), keepstep.Kind, len])
def test_anything_else_is_refused_with_what_it_takes(x: object) -> None:
    with pytest.raises(keepstep.UsageError, match="Keepstep cannot protect a") as raised:
        keepstep.protect(x)
    assert "Accelerator" in raised.value.hint
    assert "keepstep.Checkpointer" in raised.value.hint


def test_an_integration_that_fails_costs_one_warning_and_not_the_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, "accelerate", AttributeError("no such attribute"))
    trainer = trainer_of("accelerate.accelerator", "Accelerator")
    assert keepstep.protect(trainer) is trainer
    assert capsys.readouterr().err == "keepstep: Mine is not protected: AttributeError: no such attribute\n"
