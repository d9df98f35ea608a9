"""Where a checkpoint directory and what is watched may lie is decided by what is written, as the reader writes it."""

from collections.abc import Mapping
from typing import Any

import pytest

from keepstep_agent.core.settings import checks
from keepstep_agent.core.settings.table import parse_seconds, setting_field


def setting_problems(values: Mapping[str, Any]) -> list[str]:
    return list(checks.setting_problems(values, lambda key: setting_field(key).flag))


def problems(volume: str, checkpoint_directory: str) -> list[str]:
    values = {"volume": volume, "checkpoint_directory": checkpoint_directory, "store.destination": "s3://bucket"}
    return setting_problems(values)


@pytest.mark.parametrize(
    ("volume", "directory"),
    [
        ("/volume", "/volume"),
        ("/volume", "/volume/a/b"),
        ("/volume", "/volume//a/./b"),
        # What `..` leads to is known to the disk alone: a link may stand before it.
        ("/volume", "/volume/../elsewhere"),
        ("/", "/a"),
        ("//volume", "//volume/a"),
    ],
)
def test_a_checkpoint_directory_may_be_the_volume_or_lie_anywhere_below_it(volume: str, directory: str) -> None:
    assert problems(volume, directory) == []


@pytest.mark.parametrize(
    ("volume", "directory"),
    [
        ("/volume", "/volume2"),
        ("/volume", "/"),
        ("/volume/a", "/volume"),
        ("/volume", "/other/../volume/a"),
        ("/volume", "//volume/a"),
    ],
)
def test_a_checkpoint_directory_elsewhere_is_refused(volume: str, directory: str) -> None:
    assert problems(volume, directory) == [f"--checkpoint-directory: {directory} must lie below the volume {volume}"]


def watch_problems(*directories: str) -> list[str]:
    return setting_problems({"volume": "/volume", "store.destination": "s3://bucket", "watch": directories})


@pytest.mark.parametrize(
    "directories", [(), ("/volume/checkpoints",), ("/volume/checkpoints", "/out"), ("/out", "/output")]
)
def test_watched_directories_may_lie_anywhere_beside_each_other(directories: tuple[str, ...]) -> None:
    assert watch_problems(*directories) == []


@pytest.mark.parametrize(
    ("directories", "problem"),
    [
        (("/b/out", "/a/out"), "--watch: /a/out and /b/out have the same last name: snapshots tell directories by it"),
        (("/out", "/out/logs"), "--watch: /out/logs lies below /out: give only /out"),
        (("/volume/.keepstep",), "--watch: /volume/.keepstep: '.keepstep/file' lies in the reserved folder .keepstep"),
        (("/",), "--watch: /: '/file' is not a plain relative path"),
    ],
)
def test_watched_directories_must_not_be_taken_for_each_other(directories: tuple[str, ...], problem: str) -> None:
    assert watch_problems(*directories) == [problem]


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("2s", 2), ("10m", 600), ("1.5h", 5400), ("7 d", 604_800), (" 0s ", 0)]
)
def test_a_duration_is_seconds_or_a_number_with_a_unit(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "1w", "1 M", "1e9", "nan", "1h30m", "9" * 13])
def test_what_is_no_duration_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration; write seconds, or a number with s, m, h or d"):
        parse_seconds(text)


@pytest.mark.parametrize(
    "url",
    [
        *("s3cr3t", "ftp://host/s3cr3t", "https:///s3cr3t", "https://[::1/s3cr3t", "https://host:port/s3cr3t"),
        *("https://host:99999/s3cr3t", "https://ho st/s3cr3t", "http://user:s3cr3t@"),
    ],
)
def test_a_url_for_events_that_is_none_is_refused_and_not_repeated(url: str) -> None:
    values = {"volume": "/volume", "store.destination": "s3://bucket", "events.event_url": url}
    (problem,) = setting_problems(values)
    assert "--event-url" in problem
    assert "s3cr3t" not in problem


@pytest.mark.parametrize("url", ["https://host/a?b=c#d", "http://user:word@host:8080", "http://[::1]:80/x"])
def test_a_url_for_events_is_taken(url: str) -> None:
    values = {"volume": "/volume", "store.destination": "s3://bucket", "events.event_url": url}
    assert setting_problems(values) == []


@pytest.mark.parametrize(
    "endpoint", ["root:hunter2@minio:9000", "minio:9000", "https://root:hunt/er2@minio", "ftp://root:hunter2@minio"]
)
def test_an_endpoint_that_is_no_url_is_refused_and_not_repeated(endpoint: str) -> None:
    values = {"volume": "/volume", "store.destination": "s3://bucket", "store.endpoint_url": endpoint}
    assert setting_problems(values) == ["--endpoint-url is not a URL such as https://host:port"]


@pytest.mark.parametrize("endpoint", ["", "https://minio", "http://user:word@minio:9000/", "http://[::1]:80"])
def test_an_endpoint_is_taken(endpoint: str) -> None:
    values = {"volume": "/volume", "store.destination": "s3://bucket", "store.endpoint_url": endpoint}
    assert setting_problems(values) == []


@pytest.mark.parametrize("command", ["sh -c 'never closed", "   "])
def test_a_command_for_events_that_cannot_run_is_refused(command: str) -> None:
    values = {"volume": "/volume", "store.destination": "s3://bucket", "events.event_command": command}
    (problem,) = setting_problems(values)
    assert "--event-command" in problem


def test_a_priority_boost_without_cluster_events_is_refused() -> None:
    values = {"volume": "/volume", "store.destination": "s3://bucket", "cluster.priority_boost": 5}
    assert setting_problems(values) == ["--priority-boost needs --cluster-events"]
    assert setting_problems({**values, "cluster.cluster_events": True}) == []
