"""Where things are in a bucket, and which names may be there."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep_agent.core.errors import ErrorKind, RequestError
from keepstep_agent.core.limits import STEP
from keepstep_agent.core.model import Kind, SaveInfo
from keepstep_agent.core.stored.object_layout import (
    COMMITS_PREFIX,
    check_file_path,
    check_token,
    file_key,
    manifest_key,
    manifests_prefix,
    marker_key,
    parse_manifest_key,
    parse_marker_key,
    parse_pin_key,
    parse_place_key,
    pin_key,
    place_key,
    save_prefix,
)

_tokens = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,127}", fullmatch=True)


def _info(save: str = "a1-000001", step: int = 1200) -> SaveInfo:
    return SaveInfo(save=save, name="checkpoint-1200", step=step, kind=Kind.PERIODIC, world_size=4)


def test_the_layout_is_the_one_in_the_docs() -> None:
    info = _info()
    assert file_key(info, "model/shard-0.bin") == "checkpoint-1200/a1-000001/model/shard-0.bin"
    assert manifest_key(info, 8, 16) == "checkpoint-1200/a1-000001/.keepstep/manifest-00008-00016.json"
    assert marker_key(info) == ".keepstep/commits/999999998799.a1-000001.json"
    assert pin_key("attempt-7", 3) == ".keepstep/resume/attempt-7/000003.json"
    assert place_key("attempt-7", 3, "worker-1") == ".keepstep/resume/attempt-7/000003.worker-1.pod"


def test_everything_of_a_save_but_its_marker_lies_below_its_prefix() -> None:
    info = _info()
    assert file_key(info, "a").startswith(save_prefix(info))
    assert manifest_key(info, 0, 1).startswith(manifests_prefix(info))
    assert manifests_prefix(info).startswith(save_prefix(info))
    assert marker_key(info).startswith(COMMITS_PREFIX)


@given(first_rank=st.integers(0, 99), rank_count=st.integers(1, 99))
def test_a_manifest_s_key_tells_which_ranks_it_may_have(first_rank: int, rank_count: int) -> None:
    info = replace(_info(), world_size=100)
    named = (first_rank, rank_count) if first_rank + rank_count <= info.world_size else None
    assert parse_manifest_key(info, manifest_key(info, first_rank, rank_count)) == named


@pytest.mark.parametrize(
    "name",
    [
        "manifest-00000.json",
        "manifest-0-1.json",
        "manifest-00000-00000.json",
        "manifest-00000-00001.jsonx",
        "manifest--0001-00002.json",
        "pack-00000-00001.tar",
    ],
)
def test_what_is_no_manifest_s_key_is_none(name: str) -> None:
    info = replace(_info(), world_size=100)
    assert parse_manifest_key(info, f"{save_prefix(info)}.keepstep/{name}") is None
    assert parse_manifest_key(info, f"{save_prefix(_info('other'))}.keepstep/manifest-00000-00001.json") is None


@given(save=_tokens, step=st.integers(0, STEP), directory=st.sampled_from(["", ".", "checkpoints/fold 0"]))
def test_a_marker_s_key_tells_step_and_save_and_output_directory(save: str, step: int, directory: str) -> None:
    info = replace(_info(save, step), directory=directory)
    assert parse_marker_key(marker_key(info)) == (step, save, info.output_key)
    assert bool(info.output_key) == bool(directory)
    if directory:
        assert replace(info, directory="elsewhere/version_1", output=directory).output_key == info.output_key


@given(steps=st.lists(st.integers(0, 10**12 - 1), min_size=2))
def test_the_marker_of_the_greatest_step_is_listed_first(steps: list[int]) -> None:
    keys = sorted(marker_key(_info(step=step)) for step in steps)
    assert [found[0] for key in keys if (found := parse_marker_key(key))] == sorted(steps, reverse=True)


@pytest.mark.parametrize(
    "key", ["", ".keepstep/commits/", ".keepstep/commits/12.a.json", "checkpoint/save/file", "x.json"]
)
def test_what_is_no_marker_s_key_is_none(key: str) -> None:
    assert parse_marker_key(key) is None


@given(attempt=_tokens, generation=st.integers(0, 10**9 - 1), place=_tokens)
def test_the_keys_of_pins_and_places_tell_whose_they_are(attempt: str, generation: int, place: str) -> None:
    pin, taken = pin_key(attempt, generation), place_key(attempt, generation, place)
    assert (parse_pin_key(pin), parse_place_key(pin)) == ((attempt, generation), None)
    assert (parse_pin_key(taken), parse_place_key(taken)) == (None, (attempt, generation, place))


@given(first=_tokens, second=_tokens, path=st.sampled_from(["a", "b/c"]))
def test_no_key_belongs_to_two_saves(first: str, second: str, path: str) -> None:
    if first != second:
        assert file_key(_info(first), path) != file_key(_info(second), path)


@given(value=_tokens)
def test_plain_names_are_taken_as_they_are(value: str) -> None:
    assert check_token(value, "save id") == value


@pytest.mark.parametrize("value", ["", ".", "..", "a/b", "-a", "a b", "ä", "a" * 129, "a\n", ".keepstep"])
def test_what_cannot_be_part_of_a_key_is_refused(value: str) -> None:
    with pytest.raises(RequestError) as refused:
        check_token(value, "save id")
    assert refused.value.kind is ErrorKind.BAD_NAME


@pytest.mark.parametrize("path", ["a", "a/b/c.bin", "…/模型.pt", ".hidden", "a..b", "with space"])
def test_file_names_are_kept_as_the_trainer_gave_them(path: str) -> None:
    assert check_file_path(path) == path


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/a",
        "a/",
        "a//b",
        "./a",
        "a/../b",
        "..",
        ".keepstep/manifest-00000-00001.json",
        "a\x00b",
        "a\nb",
        "\udcff",
        "a" * 600,
    ],
)
def test_a_file_name_that_could_leave_its_save_or_the_store_is_refused(path: str) -> None:
    with pytest.raises(RequestError) as refused:
        check_file_path(path)
    assert refused.value.kind is ErrorKind.BAD_NAME
