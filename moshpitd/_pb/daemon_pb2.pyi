from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tensor(_message.Message):
    __slots__ = ("name", "shape", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("run", "tensors", "version", "founder", "founder_digest", "client", "api", "codec", "no_feedback", "topology", "full", "pairs", "shared", "in_place")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FOUNDER_FIELD_NUMBER: _ClassVar[int]
    FOUNDER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    API_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    NO_FEEDBACK_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    run: str
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    version: int
    founder: str
    founder_digest: bytes
    client: str
    api: int
    codec: str
    no_feedback: bool
    topology: str
    full: bool
    pairs: bool
    shared: bool
    in_place: bool
    def __init__(self, run: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., version: _Optional[int] = ..., founder: _Optional[str] = ..., founder_digest: _Optional[bytes] = ..., client: _Optional[str] = ..., api: _Optional[int] = ..., codec: _Optional[str] = ..., no_feedback: bool = ..., topology: _Optional[str] = ..., full: bool = ..., pairs: bool = ..., shared: bool = ..., in_place: bool = ...) -> None: ...

class AttachReply(_message.Message):
    __slots__ = ("trainer", "bucket_path", "bucket_bytes", "data_offset", "part_bytes", "peer_id", "version", "joined", "codec", "slots", "shared_path", "in_place")
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    BUCKET_PATH_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_OFFSET_FIELD_NUMBER: _ClassVar[int]
    PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SHARED_PATH_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    trainer: str
    bucket_path: str
    bucket_bytes: int
    data_offset: int
    part_bytes: int
    peer_id: str
    version: int
    joined: bool
    codec: str
    slots: int
    shared_path: str
    in_place: bool
    def __init__(self, trainer: _Optional[str] = ..., bucket_path: _Optional[str] = ..., bucket_bytes: _Optional[int] = ..., data_offset: _Optional[int] = ..., part_bytes: _Optional[int] = ..., peer_id: _Optional[str] = ..., version: _Optional[int] = ..., joined: bool = ..., codec: _Optional[str] = ..., slots: _Optional[int] = ..., shared_path: _Optional[str] = ..., in_place: bool = ...) -> None: ...

class HoldRequest(_message.Message):
    __slots__ = ("trainer",)
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    trainer: str
    def __init__(self, trainer: _Optional[str] = ...) -> None: ...

class HoldEvent(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: str
    def __init__(self, state: _Optional[str] = ...) -> None: ...

class DetachRequest(_message.Message):
    __slots__ = ("trainer",)
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    trainer: str
    def __init__(self, trainer: _Optional[str] = ...) -> None: ...

class DetachReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SyncRequest(_message.Message):
    __slots__ = ("trainer", "timeout_s", "generation")
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    trainer: str
    timeout_s: float
    generation: int
    def __init__(self, trainer: _Optional[str] = ..., timeout_s: _Optional[float] = ..., generation: _Optional[int] = ...) -> None: ...

class AverageRequest(_message.Message):
    __slots__ = ("trainer", "weight", "rounds", "min_participants", "on_partial", "timeout_s", "generation")
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    MIN_PARTICIPANTS_FIELD_NUMBER: _ClassVar[int]
    ON_PARTIAL_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    trainer: str
    weight: int
    rounds: int
    min_participants: int
    on_partial: str
    timeout_s: float
    generation: int
    def __init__(self, trainer: _Optional[str] = ..., weight: _Optional[int] = ..., rounds: _Optional[int] = ..., min_participants: _Optional[int] = ..., on_partial: _Optional[str] = ..., timeout_s: _Optional[float] = ..., generation: _Optional[int] = ...) -> None: ...

class ExchangeRequest(_message.Message):
    __slots__ = ("trainer", "generation", "sequence", "mass", "full", "knows", "timeout_s")
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MASS_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    KNOWS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    trainer: str
    generation: int
    sequence: int
    mass: float
    full: bool
    knows: _containers.RepeatedScalarFieldContainer[str]
    timeout_s: float
    def __init__(self, trainer: _Optional[str] = ..., generation: _Optional[int] = ..., sequence: _Optional[int] = ..., mass: _Optional[float] = ..., full: bool = ..., knows: _Optional[_Iterable[str]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class MeetRequest(_message.Message):
    __slots__ = ("trainer", "generation", "action", "timeout_s")
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    trainer: str
    generation: int
    action: str
    timeout_s: float
    def __init__(self, trainer: _Optional[str] = ..., generation: _Optional[int] = ..., action: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class Heard(_message.Message):
    __slots__ = ("peer_id", "share", "mass", "sequence", "full", "slot")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    MASS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    share: float
    mass: float
    sequence: int
    full: bool
    slot: int
    def __init__(self, peer_id: _Optional[str] = ..., share: _Optional[float] = ..., mass: _Optional[float] = ..., sequence: _Optional[int] = ..., full: bool = ..., slot: _Optional[int] = ...) -> None: ...

class Row(_message.Message):
    __slots__ = ("own_share", "heard", "unheard")
    OWN_SHARE_FIELD_NUMBER: _ClassVar[int]
    HEARD_FIELD_NUMBER: _ClassVar[int]
    UNHEARD_FIELD_NUMBER: _ClassVar[int]
    own_share: float
    heard: _containers.RepeatedCompositeFieldContainer[Heard]
    unheard: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, own_share: _Optional[float] = ..., heard: _Optional[_Iterable[_Union[Heard, _Mapping]]] = ..., unheard: _Optional[_Iterable[str]] = ...) -> None: ...

class RoundEvent(_message.Message):
    __slots__ = ("progress", "result")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    progress: Progress
    result: Result
    def __init__(self, progress: _Optional[_Union[Progress, _Mapping]] = ..., result: _Optional[_Union[Result, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("phase", "group_size", "parts_done", "parts", "round")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PARTS_DONE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    phase: str
    group_size: int
    parts_done: int
    parts: int
    round: int
    def __init__(self, phase: _Optional[str] = ..., group_size: _Optional[int] = ..., parts_done: _Optional[int] = ..., parts: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class Excluded(_message.Message):
    __slots__ = ("peer_id", "reason")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    reason: str
    def __init__(self, peer_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("status", "reason", "detail", "accepted", "group_size", "participants", "contributors", "excluded", "parts", "parts_without_result", "rounds", "version", "founder", "founder_digest", "loaded_snapshot", "newcomer", "total_weight", "group_id", "seconds", "bytes_sent", "bytes_received", "delta", "row", "moved")
    class SecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PARTICIPANTS_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PARTS_WITHOUT_RESULT_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FOUNDER_FIELD_NUMBER: _ClassVar[int]
    FOUNDER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LOADED_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    NEWCOMER_FIELD_NUMBER: _ClassVar[int]
    TOTAL_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    status: str
    reason: str
    detail: str
    accepted: bool
    group_size: int
    participants: int
    contributors: _containers.RepeatedScalarFieldContainer[str]
    excluded: _containers.RepeatedCompositeFieldContainer[Excluded]
    parts: int
    parts_without_result: _containers.RepeatedScalarFieldContainer[int]
    rounds: int
    version: int
    founder: str
    founder_digest: bytes
    loaded_snapshot: bool
    newcomer: bool
    total_weight: float
    group_id: bytes
    seconds: _containers.ScalarMap[str, float]
    bytes_sent: int
    bytes_received: int
    delta: bool
    row: Row
    moved: bool
    def __init__(self, status: _Optional[str] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ..., accepted: bool = ..., group_size: _Optional[int] = ..., participants: _Optional[int] = ..., contributors: _Optional[_Iterable[str]] = ..., excluded: _Optional[_Iterable[_Union[Excluded, _Mapping]]] = ..., parts: _Optional[int] = ..., parts_without_result: _Optional[_Iterable[int]] = ..., rounds: _Optional[int] = ..., version: _Optional[int] = ..., founder: _Optional[str] = ..., founder_digest: _Optional[bytes] = ..., loaded_snapshot: bool = ..., newcomer: bool = ..., total_weight: _Optional[float] = ..., group_id: _Optional[bytes] = ..., seconds: _Optional[_Mapping[str, float]] = ..., bytes_sent: _Optional[int] = ..., bytes_received: _Optional[int] = ..., delta: bool = ..., row: _Optional[_Union[Row, _Mapping]] = ..., moved: bool = ...) -> None: ...

class PutStateRequest(_message.Message):
    __slots__ = ("trainer", "state")
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    trainer: str
    state: bytes
    def __init__(self, trainer: _Optional[str] = ..., state: _Optional[bytes] = ...) -> None: ...

class PutStateReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStateRequest(_message.Message):
    __slots__ = ("trainer",)
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    trainer: str
    def __init__(self, trainer: _Optional[str] = ...) -> None: ...

class GetStateReply(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: bytes
    def __init__(self, state: _Optional[bytes] = ...) -> None: ...

class StorePullRequest(_message.Message):
    __slots__ = ("trainer", "generation", "timeout_s", "gamma", "batch", "max_staleness", "block")
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    trainer: str
    generation: int
    timeout_s: float
    gamma: float
    batch: int
    max_staleness: int
    block: bool
    def __init__(self, trainer: _Optional[str] = ..., generation: _Optional[int] = ..., timeout_s: _Optional[float] = ..., gamma: _Optional[float] = ..., batch: _Optional[int] = ..., max_staleness: _Optional[int] = ..., block: bool = ...) -> None: ...

class StorePullReply(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class StorePushRequest(_message.Message):
    __slots__ = ("trainer", "generation", "timeout_s", "version")
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    trainer: str
    generation: int
    timeout_s: float
    version: int
    def __init__(self, trainer: _Optional[str] = ..., generation: _Optional[int] = ..., timeout_s: _Optional[float] = ..., version: _Optional[int] = ...) -> None: ...

class StorePushReply(_message.Message):
    __slots__ = ("verdict",)
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    verdict: str
    def __init__(self, verdict: _Optional[str] = ...) -> None: ...

class ResidualsRequest(_message.Message):
    __slots__ = ("trainer", "generation", "reducer", "nothing")
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REDUCER_FIELD_NUMBER: _ClassVar[int]
    NOTHING_FIELD_NUMBER: _ClassVar[int]
    trainer: str
    generation: int
    reducer: bool
    nothing: bool
    def __init__(self, trainer: _Optional[str] = ..., generation: _Optional[int] = ..., reducer: bool = ..., nothing: bool = ...) -> None: ...

class ResidualsReply(_message.Message):
    __slots__ = ("nothing",)
    NOTHING_FIELD_NUMBER: _ClassVar[int]
    nothing: bool
    def __init__(self, nothing: bool = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Bootstrap(_message.Message):
    __slots__ = ("address", "state")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    address: str
    state: str
    def __init__(self, address: _Optional[str] = ..., state: _Optional[str] = ...) -> None: ...

class RunStatus(_message.Message):
    __slots__ = ("run", "version", "trainers", "peers", "phase", "round", "grid", "coordinates", "schema", "codec", "last_outcome", "rounds_complete", "rounds_partial", "rounds_alone", "rounds_failed", "founder", "parameters", "residual_bytes", "contributions", "idle_s", "forgotten_in_s")
    RUN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TRAINERS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    COORDINATES_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    LAST_OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_PARTIAL_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_ALONE_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FAILED_FIELD_NUMBER: _ClassVar[int]
    FOUNDER_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_IN_S_FIELD_NUMBER: _ClassVar[int]
    run: str
    version: int
    trainers: int
    peers: int
    phase: str
    round: int
    grid: _containers.RepeatedScalarFieldContainer[int]
    coordinates: _containers.RepeatedScalarFieldContainer[int]
    schema: str
    codec: str
    last_outcome: str
    rounds_complete: int
    rounds_partial: int
    rounds_alone: int
    rounds_failed: int
    founder: str
    parameters: int
    residual_bytes: int
    contributions: _containers.RepeatedCompositeFieldContainer[Contribution]
    idle_s: float
    forgotten_in_s: float
    def __init__(self, run: _Optional[str] = ..., version: _Optional[int] = ..., trainers: _Optional[int] = ..., peers: _Optional[int] = ..., phase: _Optional[str] = ..., round: _Optional[int] = ..., grid: _Optional[_Iterable[int]] = ..., coordinates: _Optional[_Iterable[int]] = ..., schema: _Optional[str] = ..., codec: _Optional[str] = ..., last_outcome: _Optional[str] = ..., rounds_complete: _Optional[int] = ..., rounds_partial: _Optional[int] = ..., rounds_alone: _Optional[int] = ..., rounds_failed: _Optional[int] = ..., founder: _Optional[str] = ..., parameters: _Optional[int] = ..., residual_bytes: _Optional[int] = ..., contributions: _Optional[_Iterable[_Union[Contribution, _Mapping]]] = ..., idle_s: _Optional[float] = ..., forgotten_in_s: _Optional[float] = ...) -> None: ...

class Contribution(_message.Message):
    __slots__ = ("peer_id", "codec", "reason", "detail")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    codec: str
    reason: str
    detail: str
    def __init__(self, peer_id: _Optional[str] = ..., codec: _Optional[str] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class LinkLine(_message.Message):
    __slots__ = ("peer_id", "cipher", "integrity", "flows", "bytes_sent", "bytes_received", "rtt_s", "up_bytes_per_s", "down_bytes_per_s")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    CIPHER_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_FIELD_NUMBER: _ClassVar[int]
    FLOWS_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    RTT_S_FIELD_NUMBER: _ClassVar[int]
    UP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DOWN_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    cipher: str
    integrity: bool
    flows: int
    bytes_sent: int
    bytes_received: int
    rtt_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    def __init__(self, peer_id: _Optional[str] = ..., cipher: _Optional[str] = ..., integrity: bool = ..., flows: _Optional[int] = ..., bytes_sent: _Optional[int] = ..., bytes_received: _Optional[int] = ..., rtt_s: _Optional[float] = ..., up_bytes_per_s: _Optional[float] = ..., down_bytes_per_s: _Optional[float] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("peer_id", "version", "uptime_s", "joined", "draining", "swarm_peers", "addresses", "join", "bootstrap", "runs", "warnings", "link_address", "bytes_sent", "bytes_received", "drain_left_s", "drain_reason", "links")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SWARM_PEERS_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAP_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    LINK_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    DRAIN_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    DRAIN_REASON_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    version: str
    uptime_s: float
    joined: bool
    draining: bool
    swarm_peers: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    join: str
    bootstrap: _containers.RepeatedCompositeFieldContainer[Bootstrap]
    runs: _containers.RepeatedCompositeFieldContainer[RunStatus]
    warnings: _containers.RepeatedScalarFieldContainer[str]
    link_address: str
    bytes_sent: int
    bytes_received: int
    drain_left_s: float
    drain_reason: str
    links: _containers.RepeatedCompositeFieldContainer[LinkLine]
    def __init__(self, peer_id: _Optional[str] = ..., version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., joined: bool = ..., draining: bool = ..., swarm_peers: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., join: _Optional[str] = ..., bootstrap: _Optional[_Iterable[_Union[Bootstrap, _Mapping]]] = ..., runs: _Optional[_Iterable[_Union[RunStatus, _Mapping]]] = ..., warnings: _Optional[_Iterable[str]] = ..., link_address: _Optional[str] = ..., bytes_sent: _Optional[int] = ..., bytes_received: _Optional[int] = ..., drain_left_s: _Optional[float] = ..., drain_reason: _Optional[str] = ..., links: _Optional[_Iterable[_Union[LinkLine, _Mapping]]] = ...) -> None: ...

class PeersRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class PeerLine(_message.Message):
    __slots__ = ("run", "peer_id", "state", "version", "round", "coordinates", "addresses", "heard_s", "strikes", "note")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    COORDINATES_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    HEARD_S_FIELD_NUMBER: _ClassVar[int]
    STRIKES_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    run: str
    peer_id: str
    state: str
    version: int
    round: int
    coordinates: _containers.RepeatedScalarFieldContainer[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    heard_s: float
    strikes: float
    note: str
    def __init__(self, run: _Optional[str] = ..., peer_id: _Optional[str] = ..., state: _Optional[str] = ..., version: _Optional[int] = ..., round: _Optional[int] = ..., coordinates: _Optional[_Iterable[int]] = ..., addresses: _Optional[_Iterable[str]] = ..., heard_s: _Optional[float] = ..., strikes: _Optional[float] = ..., note: _Optional[str] = ...) -> None: ...

class PeersReply(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[PeerLine]
    def __init__(self, peers: _Optional[_Iterable[_Union[PeerLine, _Mapping]]] = ...) -> None: ...

class RoundsRequest(_message.Message):
    __slots__ = ("run", "last")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    run: str
    last: int
    def __init__(self, run: _Optional[str] = ..., last: _Optional[int] = ...) -> None: ...

class RoundLine(_message.Message):
    __slots__ = ("run", "round", "status", "reason", "group_size", "participants", "version", "seconds", "phases", "bytes_sent", "bytes_received", "excluded", "group_id", "ago_s", "detail")
    class PhasesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PARTICIPANTS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    AGO_S_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    status: str
    reason: str
    group_size: int
    participants: int
    version: int
    seconds: float
    phases: _containers.ScalarMap[str, float]
    bytes_sent: int
    bytes_received: int
    excluded: _containers.RepeatedCompositeFieldContainer[Excluded]
    group_id: bytes
    ago_s: float
    detail: str
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ..., status: _Optional[str] = ..., reason: _Optional[str] = ..., group_size: _Optional[int] = ..., participants: _Optional[int] = ..., version: _Optional[int] = ..., seconds: _Optional[float] = ..., phases: _Optional[_Mapping[str, float]] = ..., bytes_sent: _Optional[int] = ..., bytes_received: _Optional[int] = ..., excluded: _Optional[_Iterable[_Union[Excluded, _Mapping]]] = ..., group_id: _Optional[bytes] = ..., ago_s: _Optional[float] = ..., detail: _Optional[str] = ...) -> None: ...

class RoundsReply(_message.Message):
    __slots__ = ("rounds",)
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    rounds: _containers.RepeatedCompositeFieldContainer[RoundLine]
    def __init__(self, rounds: _Optional[_Iterable[_Union[RoundLine, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("budget_s",)
    BUDGET_S_FIELD_NUMBER: _ClassVar[int]
    budget_s: float
    def __init__(self, budget_s: _Optional[float] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
