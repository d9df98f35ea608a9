"""`keepstep.protect(x)`: the one line of code for a framework's trainer.

Takes what autoload takes. Knows classes by their names alone, so that no framework is imported to ask.
"""

from importlib import import_module
from typing import Final, TypeVar

from keepstep.autoload.post_import import reason, warn
from keepstep.autoload.zero_code import TRAINERS
from keepstep.errors import ErrorKind, UsageError
from keepstep.framework_run import FrameworkRun

T = TypeVar("T")

_TAKEN: Final = (
    "a transformers Trainer (TRL's too), a Lightning Trainer, an Accelerate Accelerator or a DeepSpeedEngine; "
    "a plain loop makes a keepstep.Checkpointer"
)


def protect(x: T, *, asynchronous: bool | None = None) -> T:
    """Protect a framework's trainer: its checkpoints are announced, it saves just in time, and it resumes.

    If something goes wrong inside the framework, the trainer is not protected, one warning says so, and training
    continues. Idempotent per object.

    Args:
        x: A transformers Trainer (or TRL's), a Lightning Trainer, an Accelerate Accelerator, or a DeepSpeedEngine.
        asynchronous: False: training waits until each checkpoint is written. True: only for a copy of it, which takes
            memory for one more state; the program must not look at a checkpoint before the next save. By default the
            environment decides, else the framework: a default is not visible to the program, except as time.

    Returns:
        `x` itself.

    Raises:
        UsageError: `x` is none of these.

    Example:
        ```python
        trainer = keepstep.protect(Trainer(model, arguments, train_dataset=dataset))
        trainer.train()
        ```
    """
    integration = next(
        (
            TRAINERS[cls.__module__, cls.__qualname__]
            for cls in type(x).__mro__
            if (cls.__module__, cls.__qualname__) in TRAINERS
        ),
        None,
    )
    if integration is None:
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        raise UsageError(ErrorKind.BAD_ARGUMENT, f"Keepstep cannot protect a {kind}", hint=f"pass {_TAKEN}")
    FrameworkRun.asynchronous_by_program = asynchronous
    try:
        import_module(f"keepstep.integrations.{integration}").install(x)
    except Exception as error:
        warn(f"{type(x).__qualname__} is not protected: {reason(error)}")
    return x
