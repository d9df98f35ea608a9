"""One process of Lightning's Trainer: what is saved and resumed, and what becomes of a notice at any moment.

The real Trainer on real files; SIGTERM is a real one, and an agent answers. Several ranks: tests/trainers.
"""

import copy
import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from tests.client.agent_server import AgentServer, serving
from tests.harness.claims import claims
from tests.harness.run_process import RunProcess
from tests.harness.warm_python import TRAINER_ENVIRONMENT
from tests.integrations.conftest import leaving
from tests.servers.server import Bucket
from tests.torch_loop.torchrun import torchrun

import mooring.gate.signal_file
from mooring import protect
from mooring.asynchronous_saves.empty_file import EmptyFile
from mooring.checkpoints.records import read_records
from mooring.integrations import lightning as integration
from mooring.integrations import ownership
from mooring_api import names, signal_file
from mooring_api.v1 import agent_pb2

pytest.importorskip("lightning")
torch = pytest.importorskip("torch")
torchdata = pytest.importorskip("torchdata.stateful_dataloader")

import lightning.pytorch as pl  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # theirs
    pytest.mark.timeout(300),
]

BY_DEFAULT = Path(__file__).with_name("lightning_by_default.py")
UNLIKE_RANKS = Path(__file__).with_name("lightning_unlike_ranks.py")
RELEASE = Version(pl.__version__).release
"""tests/compatibility runs this file with older ones."""
STEPS, EPOCH = 24, 10
BY_EPOCH = {"val_check_interval": 1.0, "check_val_every_n_epoch": 1}
PERIODIC, JUST_IN_TIME, FINAL = agent_pb2.KIND_PERIODIC, agent_pb2.KIND_JUST_IN_TIME, agent_pb2.KIND_FINAL


class Model(pl.LightningModule):  # type: ignore[misc]
    """Every step depends on the random generators, and everything that was computed is written down."""

    def __init__(self, *, plateau: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1)
        )
        self.plateau = plateau
        self.computed: list[tuple[Any, ...]] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self._loss(batch)
        self.computed.append(
            ("train", self.current_epoch, self.global_step, loss.item(), self.optimizers().param_groups[0]["lr"])
        )
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("validation_loss", self._loss(batch))

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.computed.append(
                ("validation", self.global_step, self.trainer.callback_metrics["validation_loss"].item())
            )

    def on_train_epoch_end(self) -> None:
        self.computed.append(("epoch", self.current_epoch, self.global_step))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, mode="max")
        plateau = {
            "scheduler": scheduler,
            "monitor": "validation_loss",
            "interval": "step",
            "frequency": 5,
            "strict": False,
        }
        return {"optimizer": optimizer, **({"lr_scheduler": plateau} if self.plateau else {})}

    def _loss(self, batch: Any) -> Any:
        features, targets = batch
        return torch.nn.functional.mse_loss(self.layers(features), targets)


class At(pl.Callback):  # type: ignore[misc]
    """Does something once, at a hook after that many steps; `after`: at that hook's next but so many."""

    def __init__(self, hook: str, step: int, what: Callable[[], object], *, after: int = 0) -> None:
        self._step = step
        self._left = after + 1
        self._what = what
        setattr(self, hook, self._on_hook)

    def _on_hook(self, trainer: Any, *_: Any, **__: Any) -> None:
        if trainer.global_step == self._step:
            self._left -= 1
            if self._left == 0:
                self._what()


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(autouse=True)
def _process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each test is a process of its own, as far as the integration knows, and so is each Trainer: see `make`."""
    for name in (names.ENV_CHECKPOINT_DIRECTORY, names.ENV_SOCKET, names.ENV_ATTEMPT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv(names.ENV_VOLUME, str(tmp_path / "v"))
    monkeypatch.setattr(mooring.gate.signal_file, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(ownership, "_outermost", None)
    monkeypatch.setattr(integration, "_begun", False)
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) == before, "training gives SIGTERM back"


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentServer]:
    with serving(tmp_path / "v" / names.STATE_DIRECTORY / names.SOCKET, AgentServer()) as server:
        yield server


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    return tmp_path / "v"


def make(output: Path, *callbacks: Any, every: int = 4, **arguments: Any) -> Any:
    """A Trainer that saves after every so many steps."""
    # As in a process of its own.
    integration._begun = False
    pl.seed_everything(7)
    saving = [ModelCheckpoint(output, every_n_train_steps=every)] if every else []
    settings = {
        "max_steps": STEPS,
        "val_check_interval": 5,
        "check_val_every_n_epoch": None,
        "limit_val_batches": 3,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": bool(every),
        **arguments,
    }
    return pl.Trainer(callbacks=[*callbacks, *saving], **settings)


def fit(trainer: Any, *, plateau: bool = False, **arguments: Any) -> Model:
    """Train, protected; the model."""
    model = Model(plateau=plateau)
    fit_unfinished(protect(trainer), model, **arguments)
    return model


def fit_unfinished(trainer: Any, model: Model, **arguments: Any) -> None:
    """Raises what the training ends with."""
    features = torch.randn(8 * EPOCH, 8, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(features, features.square().sum(dim=1, keepdim=True))
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0)
    trainer.fit(
        model,
        torchdata.StatefulDataLoader(data, batch_size=8, sampler=sampler),
        torchdata.StatefulDataLoader(data, batch_size=8),
        **arguments,
    )


def stop(trainer: Any, *, plateau: bool = False) -> Model:
    """Train until the notice that one of its callbacks sends."""
    model = Model(plateau=plateau)
    with leaving():
        fit_unfinished(protect(trainer), model)
    return model


def weights(model: Model) -> list[Any]:
    return [parameter.tolist() for parameter in model.parameters()]


def announced(agent: AgentServer) -> list[tuple[int, int]]:
    return [(request.step, request.kind) for request in agent.requests("AnnounceCheckpoint")]


def steps(model: Model) -> list[int]:
    """Those that it trained."""
    return [entry[2] + 1 for entry in model.computed if entry[0] == "train"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """A training with these arguments that was never stopped, and has no Mooring."""
    trained: dict[str, Model] = {}

    def train_once(**arguments: Any) -> Model:
        key = repr(arguments)
        if key not in trained:
            trainer = make(tmp_path_factory.mktemp("undisturbed"), **arguments)
            trained[key] = Model(plateau=not arguments)
            fit_unfinished(trainer, trained[key])
        return trained[key]

    return train_once


def test_a_checkpoint_is_claimed_while_it_is_written(agent: AgentServer, volume: Path) -> None:
    seen: list[list[str]] = []
    fit(make(volume / "checkpoints", At("on_save_checkpoint", 4, lambda: seen.append(claims(volume))), max_steps=4))
    assert seen == [["checkpoints/epoch=0-step=4.ckpt"]]
    assert claims(volume) == []


def test_every_checkpoint_is_recorded_and_announced_and_the_last_one_is_final(agent: AgentServer, volume: Path) -> None:
    fit(make(volume / "checkpoints", max_steps=8))
    assert announced(agent) == [(4, PERIODIC), (8, FINAL)]
    records = read_records(volume / names.STATE_DIRECTORY / names.RECORDS_DIRECTORY)
    assert [(record.step, record.announced) for record in records][:1] == [(8, True)]
    # ModelCheckpoint has deleted the older one by its own rules.
    assert [path.name for path in (volume / "checkpoints").iterdir()] == ["epoch=0-step=8.ckpt"]


def test_the_last_epochs_checkpoint_is_final_too(agent: AgentServer, volume: Path) -> None:
    saving = ModelCheckpoint(volume / "checkpoints")
    fit(
        make(volume / "checkpoints", saving, every=0, enable_checkpointing=True, max_steps=-1, max_epochs=2, **BY_EPOCH)
    )
    assert announced(agent) == [(EPOCH, PERIODIC), (2 * EPOCH, FINAL)]


def test_a_second_file_of_the_same_state_is_not_announced_and_weights_alone_never(
    agent: AgentServer, volume: Path
) -> None:
    output = volume / "checkpoints"
    callbacks = [
        ModelCheckpoint(output, filename="weights", every_n_train_steps=3, save_weights_only=True),
        ModelCheckpoint(output, every_n_train_steps=4, save_last=True),
    ]
    fit(make(output, *callbacks, every=0, enable_checkpointing=True, max_steps=6))
    # Older releases also write it at the end, two steps later.
    ends_with_last = ["last.ckpt"] if RELEASE < (2, 6) else []
    announced_names = [Path(request.path).name for request in agent.requests("AnnounceCheckpoint")]
    assert announced_names == ["epoch=0-step=4.ckpt", *ends_with_last]
    assert (output / "last.ckpt").exists()


@pytest.mark.parametrize(
    ("moment", "stopped_at", "arguments"),
    [
        pytest.param(("on_sanity_check_start", 0), 1, {}, id="the sanity check"),
        pytest.param(("on_train_start", 0), 1, {}, id="the warm-up"),
        pytest.param(("on_train_batch_start", 2), 3, {}, id="between steps"),
        pytest.param(("on_train_batch_end", 4, 1), 5, {"accumulate_grad_batches": 3}, id="an accumulation"),
        pytest.param(("on_save_checkpoint", 4), 4, {}, id="a periodic save"),
        pytest.param(("on_train_batch_end", 5), 5, {}, id="a step that is validated"),
        pytest.param(("on_validation_batch_end", 5, 1), 5, {}, id="a validation"),
        pytest.param(("on_validation_end", 5), 6, {}, id="the end of a validation"),
        pytest.param(("on_train_batch_end", 13), 13, {}, id="a later epoch"),
        pytest.param(("on_train_batch_end", EPOCH), EPOCH, {"val_check_interval": 7}, id="the last step of an epoch"),
        pytest.param(("on_train_epoch_start", EPOCH), EPOCH + 1, {}, id="between epochs"),
        pytest.param(("on_train_batch_end", EPOCH), EPOCH, BY_EPOCH, id="the last step of a validated epoch"),
        pytest.param(("on_validation_batch_end", EPOCH, 2), EPOCH, BY_EPOCH, id="the validation of an epoch"),
        pytest.param(("on_train_batch_end", 7), 7, {"every": 0}, id="a training that saves nothing"),
    ],
)  # fmt: skip
def test_stopped_at_any_moment_it_resumes_there_and_nothing_differs(
    moment: tuple[Any, ...],
    stopped_at: int,
    arguments: dict[str, Any],
    agent: AgentServer,
    volume: Path,
    undisturbed: Callable[..., Model],
    caplog: pytest.LogCaptureFixture,
) -> None:
    hook, step, *after = moment
    # Of metrics that a scheduler looks at later than the validation that made them Lightning saves nothing.
    plateau = not arguments
    trainer = make(volume / "checkpoints", At(hook, step, terminate, after=sum(after)), **arguments)
    stopped = stop(trainer, plateau=plateau)
    assert announced(agent)[-1] == (stopped_at, JUST_IN_TIME)
    assert agent.requests("NotifyTermination")

    caplog.clear()
    trainer = make(volume / "checkpoints", **arguments)
    resumed = fit(trainer, plateau=plateau)
    assert trainer.global_step == STEPS
    says_what_differs = "skips what is due at its end" in caplog.text
    if says_what_differs and RELEASE < (2, 5):
        return
    assert not says_what_differs
    expected = undisturbed(**arguments)
    assert stopped.computed + resumed.computed == expected.computed
    assert weights(resumed) == weights(expected)


def test_in_the_midst_of_an_accumulation_no_step_is_saved_once_more(agent: AgentServer, volume: Path) -> None:
    arguments = {"every": 2, "accumulate_grad_batches": 3}
    stop(make(volume / "checkpoints", At("on_save_checkpoint", 2, terminate), **arguments))
    kept = volume / "checkpoints" / "epoch=0-step=2.ckpt"
    saved = kept.read_bytes()
    # The resumed training's first accumulation, before its first step.
    trainer = make(volume / "checkpoints", At("on_train_batch_end", 2, terminate, after=1), **arguments)
    stop(trainer)
    assert kept.read_bytes() == saved
    assert announced(agent) == [(2, JUST_IN_TIME), (3, JUST_IN_TIME)]


@pytest.mark.parametrize("last", [True, "link"])
def test_the_last_checkpoint_beside_the_best_one_costs_no_wait(
    last: bool | str, volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going_on, find = threading.Event(), EmptyFile.find

    def find_when_training_goes_on(file: EmptyFile, root: Path) -> Path | None:
        assert going_on.wait(60)
        return find(file, root)

    def train(output: Path) -> None:
        saving = ModelCheckpoint(output, every_n_train_steps=2, save_last=last)
        # Callbacks of checkpoints come last.
        at = At("on_train_batch_start", 2, going_on.set)
        fit(make(output, at, saving, every=0, enable_checkpointing=True, max_steps=4))

    monkeypatch.setattr(EmptyFile, "find", find_when_training_goes_on)
    train(volume / "checkpoints")
    monkeypatch.setenv(names.ENV_ASYNCHRONOUS_SAVES, "false")
    monkeypatch.setenv(names.ENV_VOLUME, str(tmp_path / "w"))
    train(tmp_path / "w" / "checkpoints")
    found = sorted((volume / "checkpoints").glob("*.ckpt"))
    assert [path.name for path in found] == ["epoch=0-step=4.ckpt", "last.ckpt"]
    assert found[1].is_symlink() is (last == "link")
    for path in found:
        ours, theirs = (
            torch.load(folder / "checkpoints" / path.name, weights_only=False) for folder in (volume, tmp_path / "w")
        )
        assert ours["global_step"] == theirs["global_step"] == 4
        assert ours["state_dict"].keys() == theirs["state_dict"].keys()
        assert all(torch.equal(value, theirs["state_dict"][name]) for name, value in ours["state_dict"].items())


def test_a_rank_that_alone_is_not_protected_holds_nobody_up(tmp_path: Path) -> None:
    ended = torchrun(UNLIKE_RANKS, str(tmp_path / "v"), directory=tmp_path / "v", libraries=["lightning.pytorch"])
    assert ended.code == 0, ended.output
    assert ended.lines("done") == ["0 3", "1 3"]
    assert {path.name for path in (tmp_path / "v").glob("*.ckpt")} == {f"step={step}.ckpt" for step in (1, 2, 3)}
    assert ended.output.count("is not protected") == 1


def test_started_in_a_pod_that_ends_it_leaves_before_the_first_step(agent: AgentServer, volume: Path) -> None:
    agent.terminating = True
    steps: list[int] = []
    stop(make(volume / "checkpoints", At("on_train_batch_end", 1, lambda: steps.append(1))))
    assert steps == []
    assert announced(agent) == []


def test_a_second_notice_in_the_just_in_time_save_changes_nothing(agent: AgentServer, volume: Path) -> None:
    stop(make(volume / "checkpoints", At("on_train_batch_end", 3, terminate), At("on_save_checkpoint", 3, terminate)))
    assert announced(agent) == [(3, JUST_IN_TIME)]


def test_stopped_twice_in_one_validation_it_still_runs_all_of_it(
    agent: AgentServer, volume: Path, undisturbed: Callable[..., Model]
) -> None:
    output = volume / "checkpoints"
    computed = []
    for batch in (1, 0, 2):
        stopped = stop(make(output, At("on_validation_batch_end", 5, terminate, after=batch)), plateau=True)
        computed += stopped.computed
        # Of our own there is one.
        assert len(list(output.glob("mooring-*"))) == 1
    assert announced(agent)[1:] == [(5, JUST_IN_TIME)] * 3
    assert computed + fit(make(output), plateau=True).computed == undisturbed().computed


def test_the_program_may_say_where_to_begin(agent: AgentServer, volume: Path) -> None:
    output = volume / "checkpoints"
    stop(make(output, At("on_train_batch_end", 7, terminate)))
    assert steps(fit(make(output, max_steps=6), ckpt_path=output / "epoch=0-step=4.ckpt")) == [5, 6]


def test_a_finished_training_is_not_trained_further(agent: AgentServer, volume: Path) -> None:
    finished = fit(make(volume / "checkpoints", max_steps=8))
    again = fit(make(volume / "checkpoints", max_steps=8))
    assert not steps(again)
    assert weights(again) == weights(finished)


def test_an_operator_has_it_save_and_go_on(agent: AgentServer, volume: Path) -> None:
    signal_path = volume / names.STATE_DIRECTORY / names.SIGNAL_FILE
    signal_path.write_bytes(signal_file.encode(signal_file.SaveSignal()))
    numbers = iter((1, 2))

    def request_save() -> None:
        with signal_path.open("r+b") as file:
            file.write(signal_file.encode(signal_file.SaveSignal(number=next(numbers))))

    fit(make(volume / "checkpoints", *(At("on_train_batch_end", step, request_save) for step in (3, 7)), max_steps=8))
    assert announced(agent) == [(3, PERIODIC), (4, PERIODIC), (7, PERIODIC), (8, FINAL)]
    assert [path.name for path in (volume / "checkpoints").glob("mooring-*")] == ["mooring-step=7.ckpt"]


def test_a_save_of_ours_that_fails_costs_only_itself(agent: AgentServer, volume: Path) -> None:
    output = volume / "checkpoints"
    signal_path = volume / names.STATE_DIRECTORY / names.SIGNAL_FILE
    signal_path.write_bytes(signal_file.encode(signal_file.SaveSignal()))

    def request_save() -> None:
        with signal_path.open("r+b") as file:
            file.write(signal_file.encode(signal_file.SaveSignal(number=1)))

    trainer = make(output, At("on_train_batch_end", 3, request_save), max_steps=4)
    write = trainer.strategy.save_checkpoint

    def write_unless_ours(checkpoint: Any, path: Any, **arguments: Any) -> None:
        if "mooring" in Path(path).name:
            raise OSError("no space left on device")
        write(checkpoint, path, **arguments)

    trainer.strategy.save_checkpoint = write_unless_ours
    assert steps(fit(trainer)) == [1, 2, 3, 4]
    assert announced(agent) == [(4, FINAL)]


def test_outside_the_volume_it_trains_as_ever_and_what_is_saved_just_in_time_is_in_it(
    agent: AgentServer, volume: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop(make(tmp_path / "elsewhere", At("on_train_batch_end", 11, terminate)))
    assert announced(agent) == [(11, JUST_IN_TIME)]
    assert sum("outside the volume" in message for message in caplog.messages) == 1
    assert steps(fit(make(tmp_path / "elsewhere", max_steps=12))) == [12]


def make_by_default(*callbacks: Any, **arguments: Any) -> Any:
    """A Trainer whose program says nothing of where its checkpoints or its logs go."""
    settings = {"enable_checkpointing": True, "max_steps": -1, "max_epochs": 1, **BY_EPOCH, **arguments}
    return make(Path(), *callbacks, every=0, **settings)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.mark.parametrize("logger", [True, False])
def test_a_program_that_names_no_directory_has_its_checkpoints_stored(
    agent: AgentServer, volume: Path, elsewhere: Path, caplog: pytest.LogCaptureFixture, logger: bool
) -> None:
    with caplog.at_level(logging.INFO, logger="mooring"):
        fit(make_by_default(logger=logger))
    assert [path.name for path in (volume / "checkpoints").iterdir()] == ["epoch=0-step=10.ckpt"]
    assert announced(agent) == [(EPOCH, FINAL)]
    assert sum("names no directory" in message for message in caplog.messages) == 1
    assert not list(elsewhere.glob("**/*.ckpt"))


def test_several_callbacks_without_a_directory_share_it(agent: AgentServer, volume: Path, elsewhere: Path) -> None:
    callbacks = [ModelCheckpoint(filename="first", every_n_train_steps=4)]
    callbacks += [ModelCheckpoint(filename="second", every_n_train_steps=5)]
    fit(make_by_default(*callbacks))
    assert {path.name for path in (volume / "checkpoints").iterdir()} == {"first.ckpt", "second.ckpt"}
    assert not list(elsewhere.glob("**/*.ckpt"))


def test_a_callback_that_the_model_brings_writes_there_too(
    agent: AgentServer, volume: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    brought = [ModelCheckpoint(filename="brought", every_n_train_steps=4)]
    monkeypatch.setattr(Model, "configure_callbacks", lambda self: brought)
    fit(make_by_default())
    assert [path.name for path in (volume / "checkpoints").iterdir()] == ["brought.ckpt"]


def test_what_it_saves_by_default_survives_the_loss_of_the_volume(rclone_bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    command = (sys.executable, str(BY_DEFAULT))
    lines = []
    for crash_at, code in ((7, 7), (-1, 0)):
        volume = tmp_path / f"volume-{code}"
        trainer = {"CRASH_AT": crash_at, "WORK": tmp_path / "work"}
        options: dict[str, Any] = {"command": command, "endpoint_url": rclone_bucket.endpoint_url}
        options |= {"trainer": trainer, "environment": TRAINER_ENVIRONMENT}
        with RunProcess(volume, rclone_bucket.destination, **options) as run:
            assert run.wait(200) == code, run.output()
        lines.append([line for line in run.output().splitlines() if line.startswith("step=")])
    assert lines == [[f"step={step}" for step in range(1, 8)], [f"step={step}" for step in range(6, 16)]]


@pytest.mark.parametrize("of", ["the Trainer", "a logger", "a callback"])
def test_a_directory_that_the_program_chose_stays(
    agent: AgentServer, volume: Path, elsewhere: Path, caplog: pytest.LogCaptureFixture, of: str
) -> None:
    from lightning.pytorch.loggers import CSVLogger

    chosen = elsewhere / "chosen"
    arguments: dict[str, Any] = {
        "the Trainer": {"default_root_dir": chosen},
        "a logger": {"logger": CSVLogger(chosen)},
        "a callback": {},
    }[of]
    trainer = make_by_default(**arguments)
    if of == "a callback":
        trainer.checkpoint_callback.dirpath = str(chosen)
    fit(trainer)
    assert len(list(chosen.glob("**/*.ckpt"))) == 1
    assert not list(volume.glob("checkpoints/*.ckpt"))
    assert sum("outside the volume" in message for message in caplog.messages) == 1


def test_without_a_volume_or_without_checkpoints_nothing_is_moved(
    volume: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert protect(make_by_default(fast_dev_run=True)).checkpoint_callback.dirpath is None
    assert protect(make(volume, every=0)).checkpoint_callback is None
    monkeypatch.delenv(names.ENV_VOLUME)
    assert protect(make_by_default()).checkpoint_callback.dirpath is None


def test_a_validation_before_the_training_and_the_best_checkpoint_after_it_find_the_same_directory(
    agent: AgentServer, volume: Path, elsewhere: Path
) -> None:
    trainer = protect(make_by_default())
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 8), torch.randn(8, 1)))
    trainer.validate(Model(), loader, verbose=False)
    model = fit(trainer)
    assert announced(agent) == [(EPOCH, FINAL)]
    trainer.validate(model, loader, ckpt_path="best", verbose=False)
    fit_unfinished(trainer, model, ckpt_path="last")


def test_another_training_of_the_process_does_not_write_among_the_protected_ones_checkpoints(
    agent: AgentServer, volume: Path, elsewhere: Path
) -> None:
    first, second = protect(make_by_default()), protect(make_by_default())
    fit(first)
    fit(second)
    assert len(list((volume / "checkpoints").iterdir())) == 1
    assert len(list(elsewhere.glob("**/*.ckpt"))) == 1


def test_a_write_in_the_background_is_announced_when_it_is_done(agent: AgentServer, volume: Path) -> None:
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    output = volume / "checkpoints"
    stop(make(output, At("on_train_batch_end", 7, terminate), plugins=[AsyncCheckpointIO()]))
    assert announced(agent) == [(4, PERIODIC), (7, JUST_IN_TIME)]
    assert steps(fit(make(output, max_steps=8))) == [8]


def test_a_second_training_is_neither_resumed_nor_announced(
    agent: AgentServer, volume: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fit(make(volume / "checkpoints" / "first", max_steps=4))
    second = make(volume / "checkpoints" / "second", max_steps=4)
    integration._begun = True
    assert steps(fit(second)) == [1, 2, 3, 4]
    assert announced(agent) == [(4, FINAL)]
    assert "mooring: this training is not protected" in capfd.readouterr().err


def test_a_tuners_trial_is_not_the_training(agent: AgentServer, volume: Path, tmp_path: Path) -> None:
    from lightning.pytorch.tuner import Tuner

    trainer = protect(make(volume / "checkpoints", max_steps=4, default_root_dir=tmp_path))
    model = Model()
    model.lr = 1e-2
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(80, 8), torch.randn(80, 1)))
    Tuner(trainer).lr_find(model, loader, loader, num_training=8)
    assert announced(agent) == []
    fit(trainer)
    assert announced(agent) == [(4, FINAL)]


def test_validation_outside_of_training_leaves_sigterm_alone(volume: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    trainer = protect(make(volume / "checkpoints"))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 8), torch.randn(8, 1)))
    trainer.validate(Model(), loader, verbose=False)
    assert signal.getsignal(signal.SIGTERM) == before
    assert not (volume / names.STATE_DIRECTORY).exists()


def test_slurms_requeueing_keeps_the_signals(
    agent: AgentServer, volume: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    for name, value in {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"):
        monkeypatch.setenv(name, "0")
    handlers: list[Any] = []
    look = At("on_train_batch_end", 2, lambda: handlers.append(signal.getsignal(signal.SIGTERM)))
    environment = SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR2)
    fit(make(volume / "checkpoints", look, max_steps=4, plugins=[environment]))
    assert type(handlers[0]).__name__ == "_HandlersCompose"
    assert announced(agent) == [(4, FINAL)]
    assert capfd.readouterr().err.count("SLURM's auto-requeue has the signals") == 1


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_every_trainer_is_protected_without_a_line_of_code(
    package: str, agent: AgentServer, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pytest.importorskip(f"{package}.trainer.trainer")
    monkeypatch.setattr(module.Trainer, "__init__", module.Trainer.__init__)
    integration.autoload(module)
    trainer = module.Trainer(enable_checkpointing=False, logger=False, accelerator="cpu")
    # Also in a program that says it.
    assert sum("MooringProtection" in type(callback).__name__ for callback in protect(trainer).callbacks) == 1


def test_a_trainer_can_still_be_copied_and_sent_to_another_process(volume: Path) -> None:
    trainer = protect(make(volume / "checkpoints"))
    for other in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
        assert other.callbacks[-1] is not trainer.callbacks[-1]
        assert type(other.callbacks[-1]).__name__ == "MooringProtection"


def test_a_version_that_is_too_different_trains_unprotected(
    agent: AgentServer, volume: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = make(volume / "checkpoints", max_steps=5)
    signals = trainer._signal_connector
    trainer._signal_connector = Renamed()
    assert protect(trainer) is trainer
    trainer.callbacks.insert(-1, At("on_fit_start", 0, lambda: setattr(trainer, "_signal_connector", signals)))
    assert steps(fit(trainer)) == [1, 2, 3, 4, 5]
    assert announced(agent) == []
    assert capfd.readouterr().err.count("Trainer is not protected") == 1


class Renamed:
    """Has nothing that we know of."""
