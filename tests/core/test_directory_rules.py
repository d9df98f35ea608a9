"""A checkpoint is complete only when its layout proves it, and nothing has moved for a while."""

from dataclasses import replace

import pytest

from mooring_agent.core.watch.checkpoint_layouts import DirectorySnapshot, FileSnapshot, Proof
from mooring_agent.core.watch.directory_rules import Observation, Verdict, candidate, checkpoint_name, judge, step_of

QUIET_SECONDS = 3.0


def _file(path: str, proof: Proof = Proof.NONE, *, mtime_ns: int = 1, size_bytes: int = 10) -> FileSnapshot:
    return FileSnapshot(path=path, size_bytes=size_bytes, mtime_ns=mtime_ns, inode=1, proof=proof)


def _directory(*files: FileSnapshot, name: str = "checkpoint-10", folders: tuple[str, ...] = ()) -> DirectorySnapshot:
    return DirectorySnapshot(name=name, single_file=False, files=files, folders=folders, seen_at=0.0)


def _single(name: str, proof: Proof) -> DirectorySnapshot:
    return DirectorySnapshot(name=name, single_file=True, files=(_file(name, proof),), folders=(), seen_at=0.0)


def _look(snapshot: DirectorySnapshot, previous: Observation | None, *, world_size: int = 0) -> Verdict:
    return judge(snapshot, previous, quiet_seconds=QUIET_SECONDS, world_size=world_size)


def _judge_when_quiet(snapshot: DirectorySnapshot, *, world_size: int = 0) -> Verdict:
    first = _look(snapshot, None, world_size=world_size)
    later = replace(snapshot, seen_at=snapshot.seen_at + QUIET_SECONDS)
    return _look(later, first.observation, world_size=world_size)


HUGGING_FACE = (
    _file("model.safetensors", Proof.WHOLE),
    _file("optimizer.pt", Proof.WHOLE),
    _file("trainer_state.json", Proof.WHOLE),
)


def test_nothing_is_complete_before_it_was_quiet() -> None:
    snapshot = _single("model.pt", Proof.WHOLE)
    first = _look(snapshot, None)
    assert not first.complete
    assert not _look(replace(snapshot, seen_at=2.9), first.observation).complete
    grown = replace(snapshot, files=(_file("model.pt", Proof.WHOLE, mtime_ns=2),), seen_at=2.9)
    second = _look(grown, first.observation)
    assert not _look(replace(grown, seen_at=5.0), second.observation).complete
    assert _look(replace(grown, seen_at=5.9), second.observation).complete


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "last.ckpt", "model.safetensors"])
def test_a_single_file_is_complete_when_its_format_proves_its_end(name: str) -> None:
    assert _judge_when_quiet(_single(name, Proof.WHOLE)).complete
    assert "cut short" in _judge_when_quiet(_single(name, Proof.BROKEN)).reason
    assert "announce" in _judge_when_quiet(_single(name, Proof.NONE)).reason


def test_a_directory_without_a_known_layout_is_never_complete() -> None:
    verdict = _judge_when_quiet(_directory(_file("weights.pt", Proof.WHOLE), _file("notes.txt")))
    assert not verdict.complete
    assert "announce" in verdict.reason
    assert not _judge_when_quiet(_directory()).complete


def test_dcp_is_complete_when_its_metadata_is_no_older_than_its_data() -> None:
    data = (_file("__0_0.distcp", mtime_ns=5), _file("__1_0.distcp", mtime_ns=7))
    assert "is not written yet" in _judge_when_quiet(_directory(*data)).reason
    assert "__1_0.distcp is newer" in _judge_when_quiet(_directory(*data, _file(".metadata", mtime_ns=6))).reason
    assert _judge_when_quiet(_directory(*data, _file(".metadata", mtime_ns=7))).complete


def test_dcp_is_not_complete_without_a_file_that_its_metadata_names_as_that_of_another_pod() -> None:
    named = replace(_file("model/.metadata"), names=frozenset({"__0_0.distcp", "__1_0.distcp"}))
    verdict = _judge_when_quiet(_directory(_file("model/__0_0.distcp"), named, *HUGGING_FACE))
    assert verdict.reason == "model/__1_0.distcp, which model/.metadata names, is missing"
    both = (_file("__0_0.distcp"), _file("__1_0.distcp"), replace(named, path=".metadata"))
    assert _judge_when_quiet(_directory(*both)).complete


def test_every_dcp_folder_inside_a_checkpoint_counts() -> None:
    files = (
        *HUGGING_FACE,
        _file("rng_state.pth", Proof.WHOLE),
        _file("model_0/__0_0.distcp"),
        _file("model_0/.metadata"),
        _file("optimizer_0/__0_0.distcp"),
    )
    assert "optimizer_0/.metadata" in _judge_when_quiet(_directory(*files)).reason
    assert _judge_when_quiet(_directory(*files, _file("optimizer_0/.metadata"))).complete


def test_hugging_face_of_one_rank_needs_state_and_rng() -> None:
    rng = _file("rng_state.pth", Proof.WHOLE)
    assert not _judge_when_quiet(_directory(*HUGGING_FACE[:2], rng)).complete
    assert not _judge_when_quiet(_directory(*HUGGING_FACE)).complete
    assert _judge_when_quiet(_directory(*HUGGING_FACE, rng)).complete
    assert _judge_when_quiet(_directory(*HUGGING_FACE, rng), world_size=1).complete
    half_written = _file("trainer_state.json", Proof.BROKEN)
    assert not _judge_when_quiet(_directory(*HUGGING_FACE[:2], half_written, rng)).complete
    too_large = _file("trainer_state.json", Proof.NONE)
    assert "announce it" in _judge_when_quiet(_directory(*HUGGING_FACE[:2], too_large, rng)).reason
    cut = _file("optimizer.pt", Proof.BROKEN)
    assert "optimizer.pt" in _judge_when_quiet(_directory(HUGGING_FACE[0], cut, HUGGING_FACE[2], rng)).reason


def test_hugging_face_waits_for_the_rng_state_of_every_rank() -> None:
    rngs = [_file(f"rng_state_{rank}.pth", Proof.WHOLE) for rank in range(4)]
    assert "rng_state_3.pth" in _judge_when_quiet(_directory(*HUGGING_FACE, *rngs[:3]), world_size=4).reason
    assert _judge_when_quiet(_directory(*HUGGING_FACE, *rngs), world_size=4).complete


def test_what_is_numbered_by_rank_is_not_complete_while_nobody_knows_how_many_there_are() -> None:
    rngs = [_file(f"rng_state_{rank}.pth", Proof.WHOLE) for rank in range(2)]
    for files in ((*HUGGING_FACE, *rngs), ACCELERATE, _deepspeed(2)):
        verdict = _judge_when_quiet(_directory(*files))
        assert "set world_size" in verdict.reason
        assert "announce it" in verdict.reason


def test_what_is_of_more_ranks_than_was_said_is_not_complete() -> None:
    rngs = [_file(f"rng_state_{rank}.pth", Proof.WHOLE) for rank in range(3)]
    third = _file("random_states_2.pkl", Proof.WHOLE)
    for files in ((*HUGGING_FACE, *rngs), (*ACCELERATE, third), _deepspeed(3)):
        reason = _judge_when_quiet(_directory(*files), world_size=2).reason
        assert reason.startswith("3 ranks wrote it, world_size is 2")


def test_deepspeed_of_one_pod_is_not_complete_whichever_it_is() -> None:
    """Each pod has the states of its ranks alone."""
    of_four = _deepspeed(4)
    first, second = (*of_four[0:2], *of_four[4:6]), (*of_four[2:4], *of_four[6:8])
    assert "2 of 4 ranks" in _judge_when_quiet(_directory(*first), world_size=4).reason
    assert "2 of 4 ranks" in _judge_when_quiet(_directory(*second), world_size=4).reason
    assert "4 ranks wrote it" in _judge_when_quiet(_directory(*second), world_size=2).reason
    assert _judge_when_quiet(_directory(*of_four), world_size=4).complete


ACCELERATE = (
    _file("model.safetensors", Proof.WHOLE),
    _file("optimizer.bin", Proof.WHOLE),
    _file("scheduler.bin", Proof.WHOLE),
    _file("random_states_0.pkl", Proof.WHOLE),
    _file("random_states_1.pkl", Proof.WHOLE),
)


def test_accelerate_is_complete_when_every_rank_has_written_its_random_states() -> None:
    assert _judge_when_quiet(_directory(*ACCELERATE), world_size=2).complete
    for absent in (3, 4):
        files = ACCELERATE[:absent] + ACCELERATE[absent + 1 :]
        assert f"random_states_{absent - 3}" in _judge_when_quiet(_directory(*files), world_size=2).reason
    assert not _judge_when_quiet(_directory(*ACCELERATE[:3]), world_size=2).complete
    cut = (_file("optimizer.bin", Proof.BROKEN), *ACCELERATE)
    assert "optimizer.bin" in _judge_when_quiet(_directory(*cut), world_size=2).reason
    # Sharded by FSDP, its states are DCP folders.
    sharded = (*ACCELERATE[3:], _file("pytorch_model_fsdp_0/__0_0.distcp", mtime_ns=2))
    assert ".metadata" in _judge_when_quiet(_directory(*sharded), world_size=2).reason
    metadata = _file("pytorch_model_fsdp_0/.metadata", mtime_ns=3)
    assert _judge_when_quiet(_directory(*sharded, metadata), world_size=2).complete


def _deepspeed(ranks: int, *, folder: str = "", model_ranks: int = 1) -> tuple[FileSnapshot, ...]:
    return tuple(
        _file(f"{folder}{prefix}zero_pp_rank_{data}_mp_rank_{model:02d}_{what}_states.pt", Proof.WHOLE)
        for what, prefix in (("model", ""), ("optim", "bf16_"))
        for data in range(ranks)
        for model in range(model_ranks)
    )


def test_deepspeed_is_complete_when_every_rank_has_written_its_optimizer_state() -> None:
    files = _deepspeed(2)
    assert _judge_when_quiet(_directory(*files, name="global_step8"), world_size=2).complete
    for absent in (2, 3):
        some = files[:absent] + files[absent + 1 :]
        assert "1 of 2" in _judge_when_quiet(_directory(*some), world_size=2).reason
    # ZeRO 1 and 2 have the model once.
    model = _file("mp_rank_00_model_states.pt", Proof.WHOLE)
    assert _judge_when_quiet(_directory(model, *files[2:]), world_size=2).complete
    assert not _judge_when_quiet(_directory(model), world_size=1).complete
    cut = (*files[:3], _file(files[3].path, Proof.BROKEN))
    assert "cut short" in _judge_when_quiet(_directory(*cut), world_size=2).reason
    # Experts have optimizer states of their own, which say nothing of the ranks.
    expert = _file("expp_rank_0_mp_rank_00_optim_states.pt", Proof.WHOLE)
    assert not _judge_when_quiet(_directory(*files[:3], expert), world_size=2).complete


def test_deepspeed_with_model_parallel_ranks_needs_every_pair_of_them() -> None:
    files = _deepspeed(2, model_ranks=2)
    assert _judge_when_quiet(_directory(*files), world_size=4).complete
    assert not _judge_when_quiet(_directory(*files[:-1]), world_size=4).complete
    stray = _file("bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt", Proof.WHOLE)
    assert not _judge_when_quiet(_directory(*files[:-1], stray), world_size=4).complete


def test_deepspeed_inside_another_frameworks_checkpoint_does_not_speak_for_it() -> None:
    inner = _deepspeed(2, folder="global_step8/")
    assert not _judge_when_quiet(_directory(*inner, _file("latest")), world_size=2).complete
    rngs = tuple(_file(f"rng_state_{rank}.pth", Proof.WHOLE) for rank in range(2))
    assert _judge_when_quiet(_directory(*inner, *HUGGING_FACE, *rngs), world_size=2).complete
    assert _judge_when_quiet(_directory(*inner, *ACCELERATE[3:]), world_size=2).complete


def test_a_checkpoint_that_is_rewritten_waits_for_every_rank_again() -> None:
    def rngs(mtime_0: int, mtime_1: int) -> tuple[FileSnapshot, ...]:
        return (
            _file("rng_state_0.pth", Proof.WHOLE, mtime_ns=mtime_0),
            _file("rng_state_1.pth", Proof.WHOLE, mtime_ns=mtime_1),
        )

    complete = _judge_when_quiet(_directory(*HUGGING_FACE, *rngs(1, 1)), world_size=2)
    assert complete.complete
    half = replace(_directory(*HUGGING_FACE, *rngs(9, 1)), seen_at=10.0)
    seen = _look(half, complete.observation, world_size=2)
    assert "again" in _look(replace(half, seen_at=20.0), seen.observation, world_size=2).reason
    whole = replace(_directory(*HUGGING_FACE, *rngs(9, 9)), seen_at=30.0)
    seen = _look(whole, seen.observation, world_size=2)
    assert _look(replace(whole, seen_at=40.0), seen.observation, world_size=2).complete


def test_orbax_is_complete_once_no_temporary_name_is_left() -> None:
    files = (_file("_CHECKPOINT_METADATA"), _file("default/manifest.ocdbt"))
    assert _judge_when_quiet(_directory(*files, name="7")).complete
    assert not _judge_when_quiet(_directory(*files, name="7.orbax-checkpoint-tmp")).complete
    assert not _judge_when_quiet(_directory(*files, name="7.orbax-checkpoint-tmp-169")).complete
    nested = _directory(*files, name="7", folders=("default", "state.orbax-checkpoint-tmp-2"))
    assert not _judge_when_quiet(nested).complete


@pytest.mark.parametrize(
    ("entry", "name", "step"),
    [
        ("checkpoint-1200", "checkpoint-1200", 1200),
        ("epoch=3-step=1200.ckpt", "epoch=3-step=1200.ckpt", 1200),
        ("model.pt", "model.pt", None),
        ("step 7 (best).pt", "step-7--best-.pt", 7),
        ("___", "checkpoint", None),
        ("modèle.safetensors", "mod-le.safetensors", None),
        ("7", "7", 7),
        ("x" * 300, "x" * 128, None),
        ("x" * 200 + ".ckpt", "x" * 123 + ".ckpt", None),
    ],
)
def test_names_and_steps_come_from_the_entry(entry: str, name: str, step: int | None) -> None:
    assert checkpoint_name(entry) == name
    assert step_of(entry) == step


def test_only_directories_and_checkpoint_files_are_candidates() -> None:
    assert candidate("checkpoint-1", single_file=False)
    assert candidate("model.pt", single_file=True)
    assert not candidate("model.pt.tmp", single_file=True)
    assert not candidate("train.log", single_file=True)
    assert not candidate(".mooring", single_file=False)


def test_the_signature_shows_every_change_and_nothing_else() -> None:
    base = _directory(_file("a"), _file("b"))
    assert replace(base, files=base.files[::-1], seen_at=99.0).signature == base.signature
    changed = [
        _directory(_file("a"), _file("b", mtime_ns=2)),
        _directory(_file("a"), _file("b", size_bytes=11)),
        _directory(_file("a"), replace(_file("b"), inode=2)),
        _directory(_file("a"), _file("c")),
        _directory(_file("a")),
        _directory(_file("a"), _file("b"), name="checkpoint-11"),
    ]
    assert len({base.signature, *(snapshot.signature for snapshot in changed)}) == len(changed) + 1
