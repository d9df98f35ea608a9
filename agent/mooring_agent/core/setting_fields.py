"""The settings' one table, made from the fields of `Settings`: what each is called, and back from values to settings.

A setting `transfer.part_size_bytes` is `--part-size-bytes`, `MOORING_PART_SIZE_BYTES`, and `part_size_bytes` in the
table `[transfer]` of the file; those of the store that only S3 knows are `MOORING_S3_…`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Final, get_args, get_type_hints

from mooring_agent.core.settings import Settings

# botocore reads the first alone; every other SDK of AWS reads the second, which is what EKS and Lambda set.
# Whoever moves a metadata service says so to every program by the cloud's own variable.
_FOREIGN_VARIABLES: Final = {
    "store.region": ("AWS_DEFAULT_REGION", "AWS_REGION"),
    "termination.notices_endpoint": ("AWS_EC2_METADATA_SERVICE_ENDPOINT", "GCE_METADATA_HOST"),
    "cluster.pod_name": ("POD_NAME",),
    "cluster.pod_namespace": ("POD_NAMESPACE",),
    "cluster.pod_uid": ("POD_UID",),
    "cluster.kubernetes_host": ("KUBERNETES_SERVICE_HOST",),
    "cluster.kubernetes_port": ("KUBERNETES_SERVICE_PORT",),
}
_STORE_WIDE: Final = frozenset({"destination"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingField:
    """One setting: where it is, what it is called, and what it means. `section` is empty at the top."""

    section: str
    name: str
    value_type: type
    help: str
    default: Any

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def environment(self) -> str:
        infix = "S3_" if self.section == "store" and self.name not in _STORE_WIDE else ""
        return f"MOORING_{infix}{self.name.upper()}"

    @property
    def foreign_variables(self) -> tuple[str, ...]:
        """Variables that are not ours and count where nobody said anything to Mooring itself."""
        return _FOREIGN_VARIABLES.get(self.key, ())


@cache
def setting_fields(cls: type = Settings, section: str = "") -> tuple[SettingField, ...]:
    """Every setting, in the order of docs/settings.md. Kept: the webhook looks at them for every pod."""
    return tuple(_fields_of(cls, section))


def _fields_of(cls: type, section: str) -> Iterator[SettingField]:
    hints = get_type_hints(cls, include_extras=True)
    for field in fields(cls):
        hint = hints[field.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from _fields_of(hint, field.name)
            continue
        value_type, text = get_args(hint)[:2]
        default = None if field.default is MISSING else field.default
        yield SettingField(section=section, name=field.name, value_type=value_type, help=text, default=default)


def build_settings(values: Mapping[str, Any]) -> Settings:
    """`values` by key, sound and with everything that must be given; defaults for the rest."""
    settings = _build(Settings, "", values)
    assert isinstance(settings, Settings)
    return settings


def _build(cls: Any, section: str, values: Mapping[str, Any]) -> Any:
    arguments: dict[str, Any] = {}
    hints = get_type_hints(cls)
    for field in fields(cls):
        if is_dataclass(hints[field.name]):
            arguments[field.name] = _build(hints[field.name], field.name, values)
            continue
        key = f"{section}.{field.name}" if section else field.name
        if key in values:
            arguments[field.name] = values[key]
    return cls(**arguments)
