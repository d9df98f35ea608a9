"""One process of Hugging Face's Trainer: what is saved and resumed, and what becomes of a notice at any moment.

The real Trainer on real files; SIGTERM is a real one, and an agent answers. Several ranks: test_hugging_face_ranks.py
and tests/trainers.
"""

import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from tests.client.agent_server import AgentServer, serving
from tests.harness.claims import claims
from tests.integrations.conftest import leaving

import mooring.gate.signal_file
from mooring import private_members, protect
from mooring.checkpoints.records import read_records, write_record
from mooring.integrations import hugging_face, ownership
from mooring.integrations.hugging_face import protection
from mooring_api import names, signal_file
from mooring_api.v1 import agent_pb2

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
TrainerCallback: Any = transformers.TrainerCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # theirs
    pytest.mark.timeout(300),
]

RELEASE = Version(transformers.__version__).release
"""tests/compatibility runs this file with older ones."""
SINCE_5 = pytest.mark.skipif(RELEASE < (5,), reason="older releases train one step more when training had ended")
STEPS, EPOCH = 12, 8
PERIODIC, JUST_IN_TIME, FINAL = agent_pb2.KIND_PERIODIC, agent_pb2.KIND_JUST_IN_TIME, agent_pb2.KIND_FINAL


class Counting:
    """Sequences that count upwards."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = (index + torch.arange(8) * (index % 3 + 1)) % 32
        return {"input_ids": tokens, "labels": tokens}


class At(TrainerCallback):  # type: ignore[misc]
    """Does something once, at an event of a step; `after`: at that event's next but so many."""

    def __init__(self, event: str, step: int, what: Callable[[], object], *, after: int = 0) -> None:
        self._step = step
        self._left = after + 1
        self._what = what
        setattr(self, event, self._on_event)

    def _on_event(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            self._left -= 1
            if self._left == 0:
                self._what()


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(autouse=True)
def _process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each test is a process of its own, as far as the integration knows: see `new_process`."""
    for name in (names.ENV_CHECKPOINT_DIRECTORY, names.ENV_SOCKET, names.ENV_ATTEMPT, "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(names.ENV_VOLUME, str(tmp_path / "v"))
    monkeypatch.setattr(mooring.gate.signal_file, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(ownership, "_outermost", None)
    monkeypatch.setattr(protection.Protection, "_trained", False)
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


def make(output: Path, *callbacks: Any, **arguments: Any) -> Any:
    """A Trainer whose every step depends on the random generators."""
    # As in a process of its own.
    protection.Protection._trained = False
    transformers.set_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_dropout=0.2,
    )
    settings = {
        "output_dir": str(output),
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "save_steps": 4,
        "report_to": "none",
        "disable_tqdm": True,
        **arguments,
    }
    return transformers.Trainer(
        model=transformers.LlamaForCausalLM(config),
        args=transformers.TrainingArguments(**settings),
        train_dataset=Counting(4 * EPOCH),
        eval_dataset={"even": Counting(24), "odd": Counting(16)},
        callbacks=list(callbacks),
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A Trainer with these arguments that was never stopped, and has no Mooring."""
    trained: dict[str, Any] = {}

    def train_once(**arguments: Any) -> Any:
        key = repr(arguments)
        if key not in trained:
            trained[key] = make(tmp_path_factory.mktemp("undisturbed"), **arguments)
            trained[key].train()
        return trained[key]

    return train_once


def train(trainer: Any, **arguments: Any) -> Any:
    """Protected; the Trainer."""
    protect(trainer).train(**arguments)
    return trainer


def stop(trainer: Any) -> None:
    """Train until the notice that one of its callbacks sends."""
    with leaving():
        train(trainer)


def logged(trainer: Any, *keys: str) -> list[tuple[int, str, float]]:
    """What the Trainer's log holds of losses and evaluations, also of what it resumed from."""
    keys = keys or ("loss", "grad_norm", "eval_even_loss", "eval_odd_loss")
    return [(entry["step"], key, entry[key]) for entry in trainer.state.log_history for key in keys if key in entry]


def weights(trainer: Any) -> list[Any]:
    return [parameter.tolist() for parameter in trainer.model.parameters()]


def announced(agent: AgentServer) -> list[tuple[int, int]]:
    return [(request.step, request.kind) for request in agent.requests("AnnounceCheckpoint")]


def test_a_checkpoint_is_claimed_from_its_first_file_until_it_is_announced(agent: AgentServer, volume: Path) -> None:
    seen: list[list[str]] = []
    trainer = make(volume / "checkpoints", At("on_save", 4, lambda: seen.append(claims(volume))), max_steps=8)
    save = trainer.save_model

    def save_model(*arguments: Any, **keywords: Any) -> None:
        seen.append(claims(volume))
        save(*arguments, **keywords)

    trainer.save_model = save_model
    train(trainer)
    # In the order of what came: the model is the first of its files, and the callbacks of others come at the end.
    assert seen == [["checkpoints/checkpoint-4"]] * 2 + [["checkpoints/checkpoint-8"]]
    assert claims(volume) == []


def test_every_checkpoint_is_recorded_and_announced_and_the_last_one_is_final(agent: AgentServer, volume: Path) -> None:
    train(make(volume / "checkpoints", max_steps=10, save_total_limit=2))
    assert announced(agent) == [(4, PERIODIC), (8, PERIODIC), (10, FINAL)]
    assert [request.path for request in agent.requests("AnnounceCheckpoint")] == [
        str(volume / "checkpoints" / f"checkpoint-{step}") for step in (4, 8, 10)
    ]
    # The Trainer has deleted the oldest by its own rules.
    records = read_records(volume / names.STATE_DIRECTORY / names.RECORDS_DIRECTORY)
    assert [(record.step, record.announced) for record in records] == [(10, True), (8, True)]
    assert sorted(path.name for path in (volume / "checkpoints").glob("checkpoint-*")) == [
        "checkpoint-10",
        "checkpoint-8",
    ]


BEST: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "even_loss"}
EVALUATING = {**BEST, "eval_strategy": "steps", "eval_steps": 4, "greater_is_better": True}
"""The best model is that of the first evaluation."""
ACCUMULATING = {**EVALUATING, "gradient_accumulation_steps": 3}
EXACT = pytest.mark.skipif(RELEASE < (5,), reason="after 4.44 to 4.50 resumed in an accumulated epoch, losses differ")
BY_EPOCH = {**BEST, "eval_strategy": "epoch", "save_strategy": "epoch", "greater_is_better": False}
"""That of the last one."""


@pytest.mark.parametrize(
    ("moment", "stopped_at", "arguments"),
    [
        pytest.param(("on_train_begin", 0), 1, {}, id="the warm-up"),
        pytest.param(("on_step_begin", 0), 1, {}, id="the first step"),
        pytest.param(("on_step_end", 3), 3, EVALUATING, id="between steps"),
        pytest.param(("on_substep_end", 2), 3, ACCUMULATING, id="an accumulation", marks=EXACT),
        pytest.param(("on_step_end", 4), 4, EVALUATING, id="a step that is evaluated"),
        pytest.param(("on_prediction_step", 4), 4, EVALUATING, id="an evaluation"),
        pytest.param(("on_prediction_step", 4, 4), 4, EVALUATING, id="a later evaluation of the same step"),
        pytest.param(("on_save", 4), 5, EVALUATING, id="a periodic save"),
        pytest.param(("on_step_end", EPOCH), EPOCH, BY_EPOCH, id="the end of an epoch"),
        pytest.param(("on_prediction_step", EPOCH), EPOCH, BY_EPOCH, id="the evaluation of an epoch"),
        pytest.param(("on_step_end", 5), 5, {"save_strategy": "no"}, id="a training that saves nothing"),
        pytest.param(("on_step_end", STEPS), STEPS, EVALUATING, id="the last step", marks=SINCE_5),
        pytest.param(("on_prediction_step", STEPS), STEPS, EVALUATING, id="the last evaluation", marks=SINCE_5),
    ],
)  # fmt: skip
def test_stopped_at_any_moment_it_resumes_there_and_nothing_differs(
    moment: tuple[Any, ...],
    stopped_at: int,
    arguments: dict[str, Any],
    agent: AgentServer,
    volume: Path,
    undisturbed: Callable[..., Any],
) -> None:
    event, step, *after = moment
    stop(make(volume / "checkpoints", At(event, step, terminate, after=sum(after)), **arguments))
    assert announced(agent)[-1] == (stopped_at, JUST_IN_TIME)
    assert agent.requests("NotifyTermination")

    resumed = train(make(volume / "checkpoints", **arguments))
    expected = undisturbed(**arguments)
    assert logged(resumed) == logged(expected)
    assert weights(resumed) == weights(expected)
    assert resumed.state.global_step == STEPS
    assert resumed.state.best_metric == expected.state.best_metric
    if RELEASE >= (4, 50):
        assert resumed.state.best_global_step == expected.state.best_global_step


def test_started_in_a_pod_that_ends_it_leaves_before_the_first_step(agent: AgentServer, volume: Path) -> None:
    agent.terminating = True
    steps: list[int] = []
    stop(make(volume / "checkpoints", At("on_step_end", 1, lambda: steps.append(1))))
    assert steps == []
    assert announced(agent) == []


def test_a_second_notice_in_the_just_in_time_save_changes_nothing(agent: AgentServer, volume: Path) -> None:
    stop(make(volume / "checkpoints", At("on_step_end", 3, terminate), At("on_save", 3, terminate)))
    assert announced(agent) == [(3, JUST_IN_TIME)]


def test_a_stop_while_an_evaluation_is_made_up_for_leaves_it_owed(
    agent: AgentServer, volume: Path, undisturbed: Callable[..., Any]
) -> None:
    stop(make(volume / "checkpoints", At("on_prediction_step", 4, terminate), **EVALUATING))
    stop(make(volume / "checkpoints", At("on_prediction_step", 4, terminate), **EVALUATING))
    assert announced(agent) == [(4, JUST_IN_TIME)]
    assert logged(train(make(volume / "checkpoints", **EVALUATING))) == logged(undisturbed(**EVALUATING))


def fail() -> None:
    raise OSError("no space left on device")


def test_a_periodic_save_that_fails_is_the_programs_and_the_agent_keeps_no_room(
    agent: AgentServer, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(volume / "checkpoints")
    monkeypatch.setattr(trainer, "_save_rng_state", lambda _: fail())
    with pytest.raises(OSError, match="no space left"):
        train(trainer)
    assert not announced(agent)
    assert len(agent.requests("AbortSave")) == 1


def test_a_just_in_time_save_that_fails_costs_only_itself(
    agent: AgentServer, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(volume / "checkpoints", At("on_step_end", 6, terminate))
    write = trainer._save_rng_state
    monkeypatch.setattr(trainer, "_save_rng_state", lambda to: fail() if "checkpoint-6" in to else write(to))
    stop(trainer)
    assert announced(agent) == [(4, PERIODIC)]
    assert train(make(volume / "checkpoints")).state.global_step == STEPS


def test_the_callbacks_of_others_hear_of_the_end(volume: Path) -> None:
    heard: list[int] = []
    stop(
        make(
            volume / "checkpoints",
            At("on_step_end", 3, terminate),
            At("on_train_end", 3, lambda: heard.append(3)),
        )
    )
    assert heard == [3]


def test_what_restore_fetched_is_resumed_from_wherever_the_trainer_saves(volume: Path) -> None:
    stop(make(volume / "checkpoints" / "run", At("on_step_end", 3, terminate)))
    # As after `mooring restore` on an empty disk.
    records = volume / names.STATE_DIRECTORY / names.RECORDS_DIRECTORY
    record = read_records(records)[0]
    write_record(records, replace(record, directory=None, committed=True))
    shutil.move(volume / "checkpoints" / "run" / record.name, volume / "checkpoints" / record.name)
    (volume / "checkpoints" / "run").rmdir()

    resumed = train(make(volume / "checkpoints" / "run"))
    assert [step for step, *_ in logged(resumed, "loss")] == list(range(1, STEPS + 1))
    assert (volume / "checkpoints" / "run" / f"checkpoint-{STEPS}").is_dir()


def test_a_torn_checkpoint_that_the_trainer_would_take_is_skipped(volume: Path) -> None:
    stop(make(volume / "checkpoints", At("on_step_end", 6, terminate)))
    (volume / "checkpoints" / "checkpoint-6" / "optimizer.pt").write_bytes(b"")
    resumed: list[int] = []
    train(make(volume / "checkpoints", At("on_train_begin", 4, lambda: resumed.append(4))), resume_from_checkpoint=True)
    assert resumed == [4]


@pytest.mark.parametrize(("wish", "begins_at"), [("checkpoint-4", 4), (True, 6), (None, 6), (False, 0)])
def test_what_the_user_wants_to_resume_from_is_what_happens(wish: Any, begins_at: int, volume: Path) -> None:
    stop(make(volume / "checkpoints", At("on_step_end", 6, terminate)))
    begun: list[int] = []
    wanted = str(volume / "checkpoints" / wish) if isinstance(wish, str) else wish
    train(
        make(volume / "checkpoints", At("on_train_begin", begins_at, lambda: begun.append(begins_at))),
        resume_from_checkpoint=wanted,
    )
    assert begun == [begins_at]


@SINCE_5
def test_a_finished_training_is_not_trained_further(volume: Path) -> None:
    finished = weights(train(make(volume / "checkpoints")))
    again = train(make(volume / "checkpoints"))
    assert weights(again) == finished
    assert again.state.global_step == STEPS


def test_with_no_room_only_the_last_checkpoint_is_written(agent: AgentServer, volume: Path) -> None:
    agent.admitted = False
    train(make(volume / "checkpoints"))
    assert announced(agent) == [(STEPS, FINAL)]
    assert [path.name for path in (volume / "checkpoints").glob("checkpoint-*")] == [f"checkpoint-{STEPS}"]


def test_an_operator_has_it_save_and_go_on(agent: AgentServer, volume: Path) -> None:
    signal_path = volume / names.STATE_DIRECTORY / names.SIGNAL_FILE
    signal_path.write_bytes(signal_file.encode(signal_file.SaveSignal()))

    def request_save() -> None:
        with signal_path.open("r+b") as file:
            file.write(signal_file.encode(signal_file.SaveSignal(number=1)))

    train(make(volume / "checkpoints", At("on_step_end", 6, request_save), max_steps=8, **EVALUATING))
    assert announced(agent) == [(4, PERIODIC), (6, PERIODIC), (8, FINAL)]


@pytest.mark.skipif(RELEASE < (5,), reason="older releases have no just-in-time saving of their own")
def test_its_own_just_in_time_saving_is_replaced(
    agent: AgentServer, volume: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mooring")
    stop(make(volume / "checkpoints", At("on_step_end", 3, terminate), enable_jit_checkpoint=True))
    assert announced(agent) == [(3, JUST_IN_TIME)]
    assert sum("enable_jit_checkpoint is replaced" in message for message in caplog.messages) == 1


def test_outside_the_volume_what_is_saved_just_in_time_is_stored_and_it_says_so(
    agent: AgentServer,
    volume: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    undisturbed: Callable[..., Any],
) -> None:
    elsewhere = tmp_path / "elsewhere"
    # The Trainer has just saved that step, elsewhere.
    stop(make(elsewhere, At("on_save", 8, terminate), save_total_limit=1))
    assert announced(agent) == [(8, JUST_IN_TIME)]
    assert not agent.requests("BeginSave"), "an agent keeps no room for what it does not get"
    assert [path.name for path in elsewhere.glob("checkpoint-*")] == ["checkpoint-8"]
    assert [path.name for path in (volume / "checkpoints").glob("checkpoint-*")] == ["checkpoint-8"]
    assert sum("outside the volume" in message for message in caplog.messages) == 1

    # On another machine.
    shutil.rmtree(elsewhere)
    resumed = train(make(elsewhere))
    assert logged(resumed) == logged(undisturbed())
    assert weights(resumed) == weights(undisturbed())
    assert announced(agent) == [(8, JUST_IN_TIME)]


def test_the_newer_is_taken_of_its_own_directory_and_what_was_saved_just_in_time(
    agent: AgentServer, volume: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    trained: list[list[int]] = []

    def go_on(*callbacks: Any) -> Any:
        begins: list[int] = []
        trained.append(begins)
        count = TrainerCallback()
        count.on_step_end = lambda args, state, control, **_: begins.append(state.global_step)
        return make(elsewhere, count, *callbacks)

    with leaving():
        train(go_on(At("on_step_end", 6, terminate)), resume_from_checkpoint=None)
    with leaving():
        # It begins with step 7, and is stopped when the directory has step 8.
        train(go_on(At("on_step_end", 9, terminate)), resume_from_checkpoint=True)
    shutil.rmtree(volume / "checkpoints" / "checkpoint-9")
    train(go_on(), resume_from_checkpoint=True)
    assert trained == [[1, 2, 3, 4, 5, 6], [7, 8, 9], [9, 10, 11, 12]]


def test_a_relative_directory_in_the_volume_is_announced_by_its_whole_path(
    agent: AgentServer, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume.mkdir(exist_ok=True)
    monkeypatch.chdir(volume)
    stop(make(Path("out"), At("on_step_end", 6, terminate)))
    paths = [request.path for request in agent.requests("AnnounceCheckpoint")]
    assert paths == [str(volume / "out" / f"checkpoint-{step}") for step in (4, 6)]
    assert train(make(Path("out"))).state.global_step == STEPS
    assert len(announced(agent)) == 4, "it resumed after step 6, and saved the steps 8 and 12"


def test_a_second_training_is_neither_resumed_nor_announced(
    agent: AgentServer, volume: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(make(volume / "checkpoints" / "first", max_steps=4))
    second = make(volume / "checkpoints" / "second", max_steps=4)
    protection.Protection._trained = True
    train(second)
    assert [step for step, *_ in logged(second, "loss")] == [1, 2, 3, 4]
    assert announced(agent) == [(4, FINAL)]
    assert "mooring: this training is not protected" in capfd.readouterr().err


def test_evaluation_and_prediction_outside_of_training_leave_sigterm_alone(volume: Path) -> None:
    trainer = protect(make(volume / "checkpoints"))
    before = signal.getsignal(signal.SIGTERM)
    handlers: list[Any] = []
    trainer.add_callback(At("on_prediction_step", 0, lambda: handlers.append(signal.getsignal(signal.SIGTERM))))
    trainer.evaluate()
    assert handlers == [before]


def test_every_trainer_is_protected_without_a_line_of_code(
    agent: AgentServer, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import trainer as module

    monkeypatch.setattr(module.Trainer, "__init__", module.Trainer.__init__)
    hugging_face.autoload(module)
    trainer = make(volume / "checkpoints", max_steps=2)
    # Also in a program that says it.
    protect(trainer)
    trainer.train()
    assert announced(agent) == [(2, FINAL)]


def test_a_version_that_is_too_different_trains_unprotected(
    volume: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(private_members, "PRIVATE_MEMBERS", {"transformers.Trainer": ("_save_in_another_way",)})
    assert train(make(volume / "checkpoints", max_steps=2)).state.global_step == 2
    said = capfd.readouterr().err
    assert said.count("Trainer is not protected") == 1
    assert f"transformers {transformers.__version__} has no transformers.Trainer._save_in_another_way" in said


def test_inside_a_trainer_that_is_too_different_nobody_else_saves(
    agent: AgentServer, volume: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = make(volume / "checkpoints")
    protect(trainer.accelerator)
    missing = {**private_members.PRIVATE_MEMBERS, "transformers.Trainer": ("_save_in_another_way",)}
    monkeypatch.setattr(private_members, "PRIVATE_MEMBERS", missing)
    # Whoever controlled the training would save and leave at once.
    agent.terminating = True
    assert train(trainer).state.global_step == STEPS
    assert not announced(agent)
    assert "Trainer is not protected" in capfd.readouterr().err
    assert not (volume / names.STATE_DIRECTORY / names.RECORDS_DIRECTORY).exists()
