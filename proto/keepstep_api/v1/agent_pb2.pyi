from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_REASON_UNSPECIFIED: _ClassVar[ErrorReason]
    ERROR_REASON_PATH_OUTSIDE_VOLUME: _ClassVar[ErrorReason]
    ERROR_REASON_PATH_MISSING: _ClassVar[ErrorReason]
    ERROR_REASON_CHECKPOINT_EMPTY: _ClassVar[ErrorReason]
    ERROR_REASON_BAD_NAME: _ClassVar[ErrorReason]
    ERROR_REASON_CONTRADICTION: _ClassVar[ErrorReason]
    ERROR_REASON_BAD_REQUEST: _ClassVar[ErrorReason]
    ERROR_REASON_UNKNOWN_SAVE: _ClassVar[ErrorReason]
    ERROR_REASON_CHECKPOINT_FAILED: _ClassVar[ErrorReason]
    ERROR_REASON_VOLUME_UNUSABLE: _ClassVar[ErrorReason]
    ERROR_REASON_SHUTTING_DOWN: _ClassVar[ErrorReason]
    ERROR_REASON_CHECKPOINT_DAMAGED: _ClassVar[ErrorReason]
    ERROR_REASON_TOO_MANY_CALLS: _ClassVar[ErrorReason]

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    KIND_PERIODIC: _ClassVar[Kind]
    KIND_JUST_IN_TIME: _ClassVar[Kind]
    KIND_FINAL: _ClassVar[Kind]
    KIND_SNAPSHOT: _ClassVar[Kind]

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_ANNOUNCED: _ClassVar[Phase]
    PHASE_STAGED: _ClassVar[Phase]
    PHASE_UPLOADING: _ClassVar[Phase]
    PHASE_SEALED: _ClassVar[Phase]
    PHASE_COMMITTED: _ClassVar[Phase]
    PHASE_RELEASED: _ClassVar[Phase]
    PHASE_SHED: _ClassVar[Phase]
    PHASE_FAILED: _ClassVar[Phase]
ERROR_REASON_UNSPECIFIED: ErrorReason
ERROR_REASON_PATH_OUTSIDE_VOLUME: ErrorReason
ERROR_REASON_PATH_MISSING: ErrorReason
ERROR_REASON_CHECKPOINT_EMPTY: ErrorReason
ERROR_REASON_BAD_NAME: ErrorReason
ERROR_REASON_CONTRADICTION: ErrorReason
ERROR_REASON_BAD_REQUEST: ErrorReason
ERROR_REASON_UNKNOWN_SAVE: ErrorReason
ERROR_REASON_CHECKPOINT_FAILED: ErrorReason
ERROR_REASON_VOLUME_UNUSABLE: ErrorReason
ERROR_REASON_SHUTTING_DOWN: ErrorReason
ERROR_REASON_CHECKPOINT_DAMAGED: ErrorReason
ERROR_REASON_TOO_MANY_CALLS: ErrorReason
KIND_UNSPECIFIED: Kind
KIND_PERIODIC: Kind
KIND_JUST_IN_TIME: Kind
KIND_FINAL: Kind
KIND_SNAPSHOT: Kind
PHASE_UNSPECIFIED: Phase
PHASE_ANNOUNCED: Phase
PHASE_STAGED: Phase
PHASE_UPLOADING: Phase
PHASE_SEALED: Phase
PHASE_COMMITTED: Phase
PHASE_RELEASED: Phase
PHASE_SHED: Phase
PHASE_FAILED: Phase

class RegisterRequest(_message.Message):
    __slots__ = ("local_rank", "rank", "world_size", "pid", "holds_liveness_lock", "client", "api_version", "recovery_point_seconds", "max_overhead", "unprotected_directory")
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOLDS_LIVENESS_LOCK_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    API_VERSION_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_POINT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_OVERHEAD_FIELD_NUMBER: _ClassVar[int]
    UNPROTECTED_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    local_rank: int
    rank: int
    world_size: int
    pid: int
    holds_liveness_lock: bool
    client: str
    api_version: int
    recovery_point_seconds: float
    max_overhead: float
    unprotected_directory: str
    def __init__(self, local_rank: _Optional[int] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., pid: _Optional[int] = ..., holds_liveness_lock: bool = ..., client: _Optional[str] = ..., api_version: _Optional[int] = ..., recovery_point_seconds: _Optional[float] = ..., max_overhead: _Optional[float] = ..., unprotected_directory: _Optional[str] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("agent_version", "volume", "newest_committed", "terminating", "api_version", "recovery_point_seconds")
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    VOLUME_FIELD_NUMBER: _ClassVar[int]
    NEWEST_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    TERMINATING_FIELD_NUMBER: _ClassVar[int]
    API_VERSION_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_POINT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    agent_version: str
    volume: str
    newest_committed: Checkpoint
    terminating: bool
    api_version: int
    recovery_point_seconds: float
    def __init__(self, agent_version: _Optional[str] = ..., volume: _Optional[str] = ..., newest_committed: _Optional[_Union[Checkpoint, _Mapping]] = ..., terminating: bool = ..., api_version: _Optional[int] = ..., recovery_point_seconds: _Optional[float] = ...) -> None: ...

class BeginSaveRequest(_message.Message):
    __slots__ = ("step", "kind", "attempt", "size_bytes", "save")
    STEP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    step: int
    kind: Kind
    attempt: str
    size_bytes: int
    save: str
    def __init__(self, step: _Optional[int] = ..., kind: _Optional[_Union[Kind, str]] = ..., attempt: _Optional[str] = ..., size_bytes: _Optional[int] = ..., save: _Optional[str] = ...) -> None: ...

class BeginSaveResponse(_message.Message):
    __slots__ = ("admitted", "reason", "save", "budget_bytes")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    admitted: bool
    reason: str
    save: str
    budget_bytes: int
    def __init__(self, admitted: bool = ..., reason: _Optional[str] = ..., save: _Optional[str] = ..., budget_bytes: _Optional[int] = ...) -> None: ...

class AnnounceCheckpointRequest(_message.Message):
    __slots__ = ("path", "step", "name", "kind", "save", "rank", "world_size", "local_world_size", "files", "attempt", "stall_seconds", "units", "others", "output")
    PATH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UNITS_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    path: str
    step: int
    name: str
    kind: Kind
    save: str
    rank: int
    world_size: int
    local_world_size: int
    files: _containers.RepeatedScalarFieldContainer[str]
    attempt: str
    stall_seconds: float
    units: _containers.RepeatedCompositeFieldContainer[Unit]
    others: _containers.RepeatedScalarFieldContainer[str]
    output: str
    def __init__(self, path: _Optional[str] = ..., step: _Optional[int] = ..., name: _Optional[str] = ..., kind: _Optional[_Union[Kind, str]] = ..., save: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., local_world_size: _Optional[int] = ..., files: _Optional[_Iterable[str]] = ..., attempt: _Optional[str] = ..., stall_seconds: _Optional[float] = ..., units: _Optional[_Iterable[_Union[Unit, _Mapping]]] = ..., others: _Optional[_Iterable[str]] = ..., output: _Optional[str] = ...) -> None: ...

class Unit(_message.Message):
    __slots__ = ("name", "done")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    name: str
    done: float
    def __init__(self, name: _Optional[str] = ..., done: _Optional[float] = ...) -> None: ...

class AnnounceCheckpointResponse(_message.Message):
    __slots__ = ("save", "phase", "size_bytes", "file_count")
    SAVE_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILE_COUNT_FIELD_NUMBER: _ClassVar[int]
    save: str
    phase: Phase
    size_bytes: int
    file_count: int
    def __init__(self, save: _Optional[str] = ..., phase: _Optional[_Union[Phase, str]] = ..., size_bytes: _Optional[int] = ..., file_count: _Optional[int] = ...) -> None: ...

class AbortSaveRequest(_message.Message):
    __slots__ = ("save",)
    SAVE_FIELD_NUMBER: _ClassVar[int]
    save: str
    def __init__(self, save: _Optional[str] = ...) -> None: ...

class AbortSaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RequestSaveRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class RequestSaveResponse(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: int
    def __init__(self, ranks: _Optional[int] = ...) -> None: ...

class NotifyTerminationRequest(_message.Message):
    __slots__ = ("grace_seconds", "source", "trainers_gone", "trainers_failed_at", "survivors_ended_well", "trainers_failed_early")
    GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TRAINERS_GONE_FIELD_NUMBER: _ClassVar[int]
    TRAINERS_FAILED_AT_FIELD_NUMBER: _ClassVar[int]
    SURVIVORS_ENDED_WELL_FIELD_NUMBER: _ClassVar[int]
    TRAINERS_FAILED_EARLY_FIELD_NUMBER: _ClassVar[int]
    grace_seconds: float
    source: str
    trainers_gone: bool
    trainers_failed_at: float
    survivors_ended_well: bool
    trainers_failed_early: bool
    def __init__(self, grace_seconds: _Optional[float] = ..., source: _Optional[str] = ..., trainers_gone: bool = ..., trainers_failed_at: _Optional[float] = ..., survivors_ended_well: bool = ..., trainers_failed_early: bool = ...) -> None: ...

class NotifyTerminationResponse(_message.Message):
    __slots__ = ("deadline",)
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    deadline: float
    def __init__(self, deadline: _Optional[float] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchStatusRequest(_message.Message):
    __slots__ = ("interval_ms",)
    INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    interval_ms: int
    def __init__(self, interval_ms: _Optional[int] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("name", "save", "step", "kind", "phase", "world_size", "size_bytes", "durable_bytes", "file_count", "announced_at", "committed_at", "reason", "directory", "output_key")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DURABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILE_COUNT_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_AT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_AT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_KEY_FIELD_NUMBER: _ClassVar[int]
    name: str
    save: str
    step: int
    kind: Kind
    phase: Phase
    world_size: int
    size_bytes: int
    durable_bytes: int
    file_count: int
    announced_at: float
    committed_at: float
    reason: str
    directory: str
    output_key: str
    def __init__(self, name: _Optional[str] = ..., save: _Optional[str] = ..., step: _Optional[int] = ..., kind: _Optional[_Union[Kind, str]] = ..., phase: _Optional[_Union[Phase, str]] = ..., world_size: _Optional[int] = ..., size_bytes: _Optional[int] = ..., durable_bytes: _Optional[int] = ..., file_count: _Optional[int] = ..., announced_at: _Optional[float] = ..., committed_at: _Optional[float] = ..., reason: _Optional[str] = ..., directory: _Optional[str] = ..., output_key: _Optional[str] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("agent_version", "destination", "live_ranks", "checkpoints", "newest_committed", "recovery_point_age_seconds", "backlog_bytes", "upload_rate_bytes_per_second", "drain_seconds", "budget_bytes", "terminating", "deadline", "storage_error", "at", "newest_snapshot", "not_stored", "fetching", "objective", "progress", "set_aside")
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    LIVE_RANKS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    NEWEST_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_POINT_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_RATE_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DRAIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    TERMINATING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    STORAGE_ERROR_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    NEWEST_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    NOT_STORED_FIELD_NUMBER: _ClassVar[int]
    FETCHING_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SET_ASIDE_FIELD_NUMBER: _ClassVar[int]
    agent_version: str
    destination: str
    live_ranks: int
    checkpoints: _containers.RepeatedCompositeFieldContainer[Checkpoint]
    newest_committed: Checkpoint
    recovery_point_age_seconds: float
    backlog_bytes: int
    upload_rate_bytes_per_second: float
    drain_seconds: float
    budget_bytes: int
    terminating: bool
    deadline: float
    storage_error: str
    at: float
    newest_snapshot: Checkpoint
    not_stored: _containers.RepeatedScalarFieldContainer[str]
    fetching: Fetching
    objective: Objective
    progress: Progress
    set_aside: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, agent_version: _Optional[str] = ..., destination: _Optional[str] = ..., live_ranks: _Optional[int] = ..., checkpoints: _Optional[_Iterable[_Union[Checkpoint, _Mapping]]] = ..., newest_committed: _Optional[_Union[Checkpoint, _Mapping]] = ..., recovery_point_age_seconds: _Optional[float] = ..., backlog_bytes: _Optional[int] = ..., upload_rate_bytes_per_second: _Optional[float] = ..., drain_seconds: _Optional[float] = ..., budget_bytes: _Optional[int] = ..., terminating: bool = ..., deadline: _Optional[float] = ..., storage_error: _Optional[str] = ..., at: _Optional[float] = ..., newest_snapshot: _Optional[_Union[Checkpoint, _Mapping]] = ..., not_stored: _Optional[_Iterable[str]] = ..., fetching: _Optional[_Union[Fetching, _Mapping]] = ..., objective: _Optional[_Union[Objective, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., set_aside: _Optional[_Iterable[str]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("step", "age_seconds", "steps_per_second", "stuck")
    STEP_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    STUCK_FIELD_NUMBER: _ClassVar[int]
    step: int
    age_seconds: float
    steps_per_second: float
    stuck: bool
    def __init__(self, step: _Optional[int] = ..., age_seconds: _Optional[float] = ..., steps_per_second: _Optional[float] = ..., stuck: bool = ...) -> None: ...

class Objective(_message.Message):
    __slots__ = ("recovery_point_seconds", "interval_seconds", "reached_seconds", "obstacle")
    RECOVERY_POINT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REACHED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OBSTACLE_FIELD_NUMBER: _ClassVar[int]
    recovery_point_seconds: float
    interval_seconds: float
    reached_seconds: float
    obstacle: str
    def __init__(self, recovery_point_seconds: _Optional[float] = ..., interval_seconds: _Optional[float] = ..., reached_seconds: _Optional[float] = ..., obstacle: _Optional[str] = ...) -> None: ...

class WaitCommittedRequest(_message.Message):
    __slots__ = ("save",)
    SAVE_FIELD_NUMBER: _ClassVar[int]
    save: str
    def __init__(self, save: _Optional[str] = ...) -> None: ...

class WaitCommittedResponse(_message.Message):
    __slots__ = ("checkpoint",)
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    checkpoint: Checkpoint
    def __init__(self, checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ...) -> None: ...

class ListCheckpointsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListCheckpointsResponse(_message.Message):
    __slots__ = ("checkpoints",)
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    checkpoints: _containers.RepeatedCompositeFieldContainer[Checkpoint]
    def __init__(self, checkpoints: _Optional[_Iterable[_Union[Checkpoint, _Mapping]]] = ...) -> None: ...

class ListRestorableRequest(_message.Message):
    __slots__ = ("wait_ms", "output_key", "name")
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_KEY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    wait_ms: int
    output_key: str
    name: str
    def __init__(self, wait_ms: _Optional[int] = ..., output_key: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class RestorableCheckpoint(_message.Message):
    __slots__ = ("step", "save", "output_key")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_KEY_FIELD_NUMBER: _ClassVar[int]
    step: int
    save: str
    output_key: str
    def __init__(self, step: _Optional[int] = ..., save: _Optional[str] = ..., output_key: _Optional[str] = ...) -> None: ...

class ListRestorableResponse(_message.Message):
    __slots__ = ("ready", "checkpoints", "storage_error")
    READY_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    STORAGE_ERROR_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    checkpoints: _containers.RepeatedCompositeFieldContainer[RestorableCheckpoint]
    storage_error: str
    def __init__(self, ready: bool = ..., checkpoints: _Optional[_Iterable[_Union[RestorableCheckpoint, _Mapping]]] = ..., storage_error: _Optional[str] = ...) -> None: ...

class FileRange(_message.Message):
    __slots__ = ("path", "offset_bytes", "length_bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    offset_bytes: int
    length_bytes: int
    def __init__(self, path: _Optional[str] = ..., offset_bytes: _Optional[int] = ..., length_bytes: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("save", "whole", "ranges", "wait_ms")
    SAVE_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    save: str
    whole: bool
    ranges: _containers.RepeatedCompositeFieldContainer[FileRange]
    wait_ms: int
    def __init__(self, save: _Optional[str] = ..., whole: bool = ..., ranges: _Optional[_Iterable[_Union[FileRange, _Mapping]]] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("done", "path", "done_bytes", "total_bytes", "storage_error", "files")
    DONE_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORAGE_ERROR_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    done: bool
    path: str
    done_bytes: int
    total_bytes: int
    storage_error: str
    files: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, done: bool = ..., path: _Optional[str] = ..., done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., storage_error: _Optional[str] = ..., files: _Optional[_Iterable[str]] = ...) -> None: ...

class Fetching(_message.Message):
    __slots__ = ("save", "step", "done_bytes", "total_bytes", "storage_error")
    SAVE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORAGE_ERROR_FIELD_NUMBER: _ClassVar[int]
    save: str
    step: int
    done_bytes: int
    total_bytes: int
    storage_error: str
    def __init__(self, save: _Optional[str] = ..., step: _Optional[int] = ..., done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., storage_error: _Optional[str] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("local_rank", "rank", "world_size", "client")
    LOCAL_RANK_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    local_rank: int
    rank: int
    world_size: int
    client: str
    def __init__(self, local_rank: _Optional[int] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., client: _Optional[str] = ...) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("terminating", "deadline", "number")
    TERMINATING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    terminating: bool
    deadline: float
    number: int
    def __init__(self, terminating: bool = ..., deadline: _Optional[float] = ..., number: _Optional[int] = ...) -> None: ...
