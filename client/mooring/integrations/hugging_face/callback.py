"""The callback for a Trainer's events. Imports transformers, so import it only where there is a Trainer."""

from typing import Any

from transformers.trainer_callback import TrainerCallback

from mooring.integrations.hugging_face.protection import Protection


class Callback(TrainerCallback):  # type: ignore[misc]  # transformers may not be installed where mypy is
    """Passes to the protection the events that it needs."""

    def __init__(self, protection: Protection) -> None:
        self._protection = protection

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._protection.begun()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._protection.before_step()

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        self._protection.evaluated_batch()

    def on_save(self, *_: Any, **__: Any) -> None:
        self._protection.saved()
