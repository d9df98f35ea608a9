"""Settings come from flags, the environment and a file, once; whatever is wrong with them is said at once."""

from pathlib import Path
from typing import Any

import pytest
from tests.pages.settings_page import settings_page

from keepstep_agent.cli.store_options import environment_of
from keepstep_agent.config import load_settings, load_some_settings, unknown_variables
from keepstep_agent.core.errors import ConfigurationError
from keepstep_agent.core.settings.table import parse_bytes, setting_fields
from keepstep_agent.core.settings.values import GIB, MIB, Settings
from keepstep_api.names import ENV_ASYNCHRONOUS_SAVES, ENV_AUTOLOAD, ENV_AUTOLOAD_PROCESSES, ENV_RESUME

ROOT = Path(__file__).parents[2]
LEAST = {"volume": "/volume", "destination": "s3://bucket/run"}


def load(*, environment: dict[str, str] | None = None, file: Path | None = None, **flags: Any) -> Settings:
    return load_settings(flags=LEAST | flags, environment=environment or {}, file=file)


def problems(**arguments: Any) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        load(**arguments)
    assert caught.value.hint == "every setting is described in docs/settings.md"
    return caught.value.problems


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keepstep.toml"


def test_a_flag_beats_the_environment_and_the_environment_beats_the_file(file: Path) -> None:
    file.write_text("[transfer]\nmax_concurrency = 3\n[termination]\ngrace_seconds = 33\n[store]\nregion = 'three'\n")
    environment = {"KEEPSTEP_MAX_CONCURRENCY": "2", "KEEPSTEP_GRACE_SECONDS": "22"}
    settings = load(max_concurrency="1", environment=environment, file=file)
    assert settings.transfer.max_concurrency == 1
    assert settings.termination.grace_seconds == 22
    assert settings.store.region == "three"


def test_the_defaults_of_a_command_lose_against_whatever_somebody_said(file: Path) -> None:
    file.write_text('volume = "/from-file"\nlog_format = "json"\n[disk]\neviction_threshold_percent = 7\n')
    defaults = {"volume": "/default", "log_format": "console", "eviction_threshold_percent": 0.0}
    flags = {"destination": "s3://bucket/run"}
    silent = load_settings(flags=flags, environment={}, defaults=defaults)
    assert (silent.volume, silent.log_format, silent.disk.eviction_threshold_percent) == ("/default", "console", 0.0)
    said = load_settings(flags=flags, environment={}, file=file, defaults=defaults)
    assert (said.volume, said.log_format, said.disk.eviction_threshold_percent) == ("/from-file", "json", 7.0)


def test_the_region_comes_from_the_variables_of_aws_where_nothing_else_says_it(file: Path) -> None:
    file.write_text("[store]\nregion = 'from-file'\n")
    aws = {"AWS_REGION": "eu-west-1"}
    assert load(environment=aws).store.region == "eu-west-1"
    assert load(environment={**aws, "AWS_DEFAULT_REGION": ""}).store.region == "eu-west-1"
    assert load(environment={**aws, "AWS_DEFAULT_REGION": "eu-north-1"}).store.region == "eu-north-1"
    assert load(environment=aws, file=file).store.region == "from-file"
    assert load(environment={**aws, "KEEPSTEP_S3_REGION": "eu-south-1"}, file=file).store.region == "eu-south-1"


def test_an_empty_variable_counts_as_not_set() -> None:
    assert load(environment={"KEEPSTEP_GRACE_SECONDS": ""}).termination.grace_seconds == 30


def test_paths_follow_from_the_volume_unless_they_are_given() -> None:
    settings = load()
    assert settings.checkpoint_directory == "/volume/checkpoints"
    assert settings.socket == "/volume/.keepstep/agent.sock"
    given = load(checkpoint_directory="/volume/runs/", socket="/run/agent.sock")
    assert (given.checkpoint_directory, given.socket) == ("/volume/runs", "/run/agent.sock")


@pytest.mark.parametrize("name", ["checkpoint_directory", "socket", "state_directory"])
def test_an_empty_path_follows_from_the_volume_too(name: str, file: Path) -> None:
    file.write_text(f"{name} = ''\n")
    empty: dict[str, Any] = {name: ""}
    assert load(**empty) == load(file=file) == load()


def test_a_relative_volume_is_meant_from_here() -> None:
    assert load(volume="here").volume == str(Path.cwd() / "here")
    assert load(volume="here", checkpoint_directory="here/runs").checkpoint_directory == str(Path.cwd() / "here/runs")


def test_a_path_loses_what_says_nothing_and_keeps_its_way_up() -> None:
    settings = load(volume="/a//b/./", checkpoint_directory="/a/b/c/../d/")
    assert (settings.volume, settings.checkpoint_directory) == ("/a/b", "/a/b/c/../d")
    assert settings.socket == "/a/b/.keepstep/agent.sock"


@pytest.mark.parametrize(
    ("said", "watched"),
    [
        (None, ("/volume/checkpoints",)),
        ("off", ()),
        ("/out", ("/out",)),
        ("/out: /logs/ :", ("/out", "/logs")),
        (("/out", "/logs"), ("/out", "/logs")),
        ("out", (str(Path.cwd() / "out"),)),
        ("/data/./a//../out", ("/data/out",)),
    ],
)
def test_what_is_watched_is_the_checkpoint_directory_or_what_is_said(said: Any, watched: tuple[str, ...]) -> None:
    assert load(watch=said).watch == watched
    if isinstance(said, str):
        assert load(environment={"KEEPSTEP_WATCH": said}).watch == watched


def test_the_watched_directories_reach_a_child_process_also_when_there_are_none() -> None:
    settings = load(watch="off")
    assert load_settings(flags={}, environment=environment_of(settings)) == settings


def test_watched_directories_in_a_file_are_a_list_or_one_text(file: Path) -> None:
    for text in ('["/out", "/logs"]', '"/out:/logs"'):
        file.write_text(f"watch = {text}\n")
        assert load(file=file).watch == ("/out", "/logs")
    file.write_text("watch = [1]\n")
    assert problems(file=file) == [f"watch in {file}: give directories, or off"]


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("0", 0), ("1000", 1000), ("64MiB", 64 * MIB), ("5 GB", 5 * 10**9), ("1.5gib", 3 * GIB // 2), ("2KB", 2000)],
)
def test_sizes_have_units(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes
    assert load(size_limit_bytes=text).disk.size_limit_bytes == size_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "5 apples", "1e9", "5 MiB free"])
def test_what_is_no_size_is_refused_with_the_ways_to_write_one(text: str, file: Path) -> None:
    file.write_text(f'[disk]\nsize_limit_bytes = "{text}"\n')
    (problem,) = problems(file=file)
    assert problem == (
        f"disk.size_limit_bytes in {file}: {text!r} is not a size; "
        "write bytes, or a number with KiB, MiB, GiB, TiB, KB, MB or GB"
    )


def test_all_mistakes_are_reported_at_once(file: Path) -> None:
    file.write_text("[transfer]\nmax_concurency = 3\n[retention]\nkeep_every_steps = 100\n")
    found = problems(
        volume=None,
        destination="gs://bucket",
        grace_seconds="soon",
        verify_tls="perhaps",
        environment={"KEEPSTEP_S3_ADDRESSING": "sideways", "KEEPSTEP_S3_TAGS": "team", "KEEPSTEP_PEAK_FACTOR": "-1"},
        file=file,
    )
    assert sorted(found) == sorted(
        [
            "KEEPSTEP_S3_ADDRESSING: 'sideways' is not one of auto, path, virtual",
            "KEEPSTEP_S3_TAGS: 'team' is not key=value",
            "KEEPSTEP_PEAK_FACTOR: -1 must be 0 or more",
            "--grace-seconds: 'soon' is not a number",
            "--verify-tls: 'perhaps' is neither true nor false",
            f"{file} has an unknown setting transfer.max_concurency; did you mean transfer.max_concurrency?",
            "volume is not set: give --volume or KEEPSTEP_VOLUME",
            "--destination: 'gs://bucket' is neither s3://bucket/prefix nor file:///absolute/path",
            f"retention.keep_every_steps in {file} needs --keep-last: with --keep-last 0 everything is kept",
        ]
    )


def test_a_setting_like_no_other_is_unknown_without_a_guess(file: Path) -> None:
    file.write_text("[kitchen]\nsink = 1\n")
    assert problems(file=file) == [f"{file} has an unknown setting kitchen.sink"]


@pytest.mark.parametrize("content", ["this is = = no TOML", None])
def test_a_file_that_cannot_be_read_is_named(content: str | None, file: Path) -> None:
    if content is not None:
        file.write_text(content)
    (problem,) = problems(file=file)
    assert problem.startswith(f"cannot read the settings file {file}: ")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("max_concurrency = true", "max_concurrency in {file}: 'true' is not a number"),
        ("part_size_bytes = false", "part_size_bytes in {file}: 'false' is not a size; write bytes"),
        ("max_concurrency = [4]", "max_concurrency in {file}: give a single value, not a list or a table"),
        ("part_size_bytes.a = 1", "part_size_bytes in {file}: give a single value, not a list or a table"),
    ],
)
def test_a_value_of_the_wrong_sort_is_told_as_the_file_has_it(line: str, said: str, file: Path) -> None:
    file.write_text(f"[transfer]\n{line}\n")
    (problem,) = problems(file=file)
    assert problem.startswith(f"transfer.{said.format(file=file)}")


def test_tags_in_a_list_are_no_tags(file: Path) -> None:
    file.write_text('[store]\ntags = ["team=vision"]\n')
    assert problems(file=file) == [
        f"store.tags in {file}: give tags as a table, or as one text of key=value pairs separated by commas"
    ]


def test_a_tag_may_be_true(file: Path) -> None:
    file.write_text("[store.tags]\nkeep = true\n")
    assert load(file=file).store.tags == (("keep", "true"),)


@pytest.mark.parametrize("number", ["nan", "inf", "-3"])
def test_a_number_must_make_sense(number: str) -> None:
    assert len(problems(grace_seconds=number)) == 1


def test_a_directory_outside_the_volume_is_refused() -> None:
    assert problems(checkpoint_directory="/elsewhere") == [
        "--checkpoint-directory: /elsewhere must lie below the volume /volume"
    ]


def test_a_socket_path_that_the_kernel_would_refuse_is_refused_before() -> None:
    (problem,) = problems(volume=f"/{'long/' * 30}")
    assert problem.endswith("is longer than 107 bytes: give --socket")


def test_tags_come_as_text_and_as_a_table(file: Path) -> None:
    file.write_text('[store.tags]\nteam = "vision"\n')
    assert load(file=file).store.tags == (("team", "vision"),)
    assert load(tags="team=vision, cost=low").store.tags == (("team", "vision"), ("cost", "low"))


def test_every_setting_survives_the_way_to_a_child_process(file: Path) -> None:
    tags = {"team, or group": "vision=best", " padded ": "100%25", "url": "s3://a/b?c=d&e", "unicode": "größe"}
    lines = "\n".join(f'"{key}" = "{value}"' for key, value in tags.items())
    file.write_text(f'watch = ["/out", "/volume/logs"]\n[disk]\npeak_factor = 1.25\n[store.tags]\n{lines}\n')
    settings = load(file=file, log_format="console", part_size_bytes="64MiB")
    assert settings.store.tags == tuple(tags.items())
    assert settings.watch == ("/out", "/volume/logs")
    assert load_settings(flags={}, environment=environment_of(settings)) == settings


def test_the_restore_step_of_a_run_reaches_the_store_as_the_run_does() -> None:
    settings = load(region="here", read_timeout_seconds="3", max_connections="5", tags="team=a%2Cb", verify_tls=False)
    environment = environment_of(settings)
    flags = {"destination": "s3://bucket/run"}
    assert load_some_settings((), flags=flags, environment=environment, defaults={}).store == settings.store


def test_flags_and_variables_are_unique() -> None:
    settings = list(setting_fields())
    assert len({setting.flag for setting in settings}) == len(settings)
    assert len({setting.environment for setting in settings}) == len(settings)


def test_the_page_of_settings_is_what_the_settings_say() -> None:
    """If this fails: python -m tests.pages.settings_page > docs/settings.md"""
    assert (ROOT / "docs/settings.md").read_text() == settings_page()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"part_size_bytes": "0"}, "--part-size-bytes: 0 is less than S3's minimum"),
        ({"part_size_bytes": "4MiB"}, "--part-size-bytes: 4194304 is less than S3's minimum"),
        ({"part_size_bytes": "6GiB"}, "--part-size-bytes: 6442450944 is more than S3's maximum"),
        (
            {"destination": f"s3://bucket/{'ü' * 128}/"},
            f"--destination: the prefix in 's3://bucket/{'ü' * 48}'… has 256 bytes: give one of less than 256",
        ),
        ({"part_size_bytes": "0", "destination": "file:///store"}, "--part-size-bytes must be 1 or more"),
        ({"eviction_threshold_percent": "100"}, "--eviction-threshold-percent must be less than 100"),
        ({"peak_factor": "0"}, "--peak-factor must be 1 or more"),
        ({"read_timeout_seconds": "0"}, "--read-timeout-seconds must be more than 0"),
        ({"grace_seconds": "2"}, "--commit-reserve-seconds 2 leaves nothing of --grace-seconds 2"),
        ({"commit_reserve_seconds": "30"}, "--commit-reserve-seconds 30 leaves nothing of --grace-seconds 30"),
        ({"attempt": "job/1"}, "--attempt: attempt 'job/1' cannot be part of an object key: use 1 to 128"),
        ({"nice": "20"}, "--nice: 20 must be 19 or less"),
        ({"nice": "-5"}, "--nice: -5 must be 0 or more"),
        ({"io_priority": "8"}, "--io-priority: '8' is not one of inherit, 0, 1, 2, 3, 4, 5, 6, 7, idle"),
        ({"io_priority": "realtime"}, "--io-priority: 'realtime' is not one of inherit, 0, 1, 2, 3, 4, 5, 6, 7, idle"),
        ({"http_address": "9090"}, "--http-address: '9090' is not host:port"),
        ({"http_address": "localhost:http"}, "--http-address: 'localhost:http' is not host:port"),
        ({"http_address": ":70000"}, "--http-address: ':70000' is not host:port"),
    ],
)
def test_what_can_never_work_is_refused_at_the_start(given: dict[str, str], said: str) -> None:
    (problem,) = problems(**given)
    assert problem.startswith(said)


@pytest.mark.parametrize("address", [":9090", "0.0.0.0:9090", "[::1]:9090", "localhost:1"])
def test_an_address_may_have_any_host_or_none(address: str) -> None:
    assert load(http_address=address).http_address == address


def test_a_file_store_takes_parts_of_any_size_and_a_folder_of_any_depth() -> None:
    deep = f"file:///{'store/' * 100}"
    assert load(destination=deep, part_size_bytes="1").transfer.part_size_bytes == 1
    assert load(destination=deep, part_size_bytes="6GiB").transfer.part_size_bytes == 6 * GIB


def test_the_longest_prefix_and_the_largest_part_are_taken() -> None:
    settings = load(destination=f"s3://bucket/{'x' * 255}/", part_size_bytes="5GiB")
    assert settings.transfer.part_size_bytes == 5 * GIB


def test_a_mistyped_variable_is_named_with_what_was_meant() -> None:
    environment = {"KEEPSTEP_DESTINATON": "s3://bucket/run", "KEEPSTEP_SINK": "1", "KEEPSTEP_VOLUME": "/volume"}
    said = [
        "the variable KEEPSTEP_DESTINATON is not a setting; did you mean KEEPSTEP_DESTINATION?",
        "the variable KEEPSTEP_SINK is not a setting",
    ]
    assert list(unknown_variables(environment)) == said
    assert problems(destination=None, environment=environment)[1:] == said


def test_the_trainers_own_variables_are_no_mistake() -> None:
    environment = {ENV_AUTOLOAD: "0", ENV_ASYNCHRONOUS_SAVES: "true", ENV_RESUME: "/volume/x"}
    environment[ENV_AUTOLOAD_PROCESSES] = "/volume/.keepstep/autoload-processes"
    assert list(unknown_variables(environment)) == []


def test_the_variables_of_kubernetes_services_are_nobodys_mistake() -> None:
    names = ("SERVICE_HOST", "SERVICE_PORT", "PORT", "PORT_443_TCP", "PORT_443_TCP_ADDR", "WEBHOOK_SERVICE_PORT_HTTPS")
    assert list(unknown_variables({f"KEEPSTEP_{name}": "10.0.0.1" for name in names})) == []
