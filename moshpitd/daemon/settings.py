"""The settings of one daemon: TOML file, then `MOSHPITD_*`, then flags, in rising priority.

One rule: a value that cannot work is refused here, as a `ConfigError` that names the file, the key
and what was expected, before anything is opened.

Validation is strict on purpose: `max_group = true` is a mistake, and lax mode would read it as 1.
The environment has only strings, so `settings_sources` turns each into the TOML value its key
expects.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from moshpitd.core.graph import PeerGraph
from moshpitd.core.params import Params
from moshpitd.daemon.addresses import Finding, address_warnings, parse_host_port, parse_multiaddr
from moshpitd.daemon.choosing import group_codec
from moshpitd.daemon.settings_sources import Misfit, Origin, Source, environment, refusal, toml_file
from moshpitd.daemon.topology_file import read_topology
from moshpitd.errors import ConfigError
from moshpitd.rpc.channel import MAX_SOCKET_BYTES, default_socket

LOSSLESS = "float32"
FLOWS_MAX = 8  # net.watch.FLOWS_MAX: importing net takes a second, and --help reads the settings
FED = ("float16", "bfloat16", "int8", "int4", "minmax-uint8", "qsgd", "natural")
"""Codecs that may average parameters, with error feedback: the residual that it keeps never exceeds
what is sent. That is sqrt(1 - delta) / (1 - sqrt(1 - delta)) <= 1 for the codec's contraction delta
(0.0005 for float16, 0.14 for int8, 0.97 for int4, 3.8 for nuqsgd, 198 for top-k). A test compares,
because settings may not import the codecs: they would bring torch."""


MIN_PART_BYTES = 4096  # a page: below, a frame is mostly its header and its way through us


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class NodeSection(_Section):
    """This machine: where the daemon keeps what, and how long it may take to leave."""

    data_dir: str = Field(default="~/.local/state/moshpitd", min_length=1)
    """Directory of everything that outlives a restart. Made (mode 0700) when missing."""
    identity: str = ""
    """Key file of this peer (Ed25519, libp2p's format). Made when missing.
    Empty: identity.key in data_dir."""
    buffers_dir: str = ""
    """Directory of the buckets, mapped files as large as a trainer's parameters: best in memory.
    Empty: /dev/shm where it can be written to, else data_dir."""
    socket: str = ""
    """Unix socket of the local API (mode 0600). Empty: where trainers look for it too, which is
    $MOSHPITD_SOCKET, else moshpitd/moshpitd.sock in $XDG_RUNTIME_DIR, else in /tmp/moshpitd-UID."""
    drain_budget_s: float = Field(default=25.0, gt=0, le=86_400)
    """How long the first SIGTERM may take to finish rounds and hand over state before the daemon
    stops. Clouds give 30 s (GCP, Azure) to 120 s (AWS); the rest is for the stop itself."""


class NetworkSection(_Section):
    """How this peer reaches the swarm and is reached."""

    listen: list[str] = Field(default=["/ip4/0.0.0.0/tcp/31337"], min_length=1, max_length=16)
    """Multiaddrs to listen on for control messages and the DHT. Port 0: any free port."""
    announce: list[str] = Field(default=[], max_length=16)
    """Multiaddrs that other peers should dial, where they differ from `listen` (1:1 NAT, a
    forwarded port). Empty: those of this machine's interfaces."""
    bootstrap: list[str] = Field(default=[], max_length=64)
    """Multiaddrs with /p2p/PEER_ID of peers that are already in the swarm.
    Empty: be the first peer."""
    link_listen: str = "0.0.0.0:31338"
    """HOST:PORT to listen on for the bulk links that carry tensors."""
    link_announce: list[str] = Field(default=[], max_length=16)
    """HOST:PORT that other peers should dial for bulk links. Empty: this machine's addresses."""
    up_mbps: float = Field(default=1000.0, gt=0, le=1e6)
    """The most that this machine can upload, in megabit per second. A slower peer reduces less, so
    what others are told is this, or what its links were seen to carry where that is less."""
    down_mbps: float = Field(default=1000.0, gt=0, le=1e6)
    """The most that it can download, likewise."""
    trusted_network: bool = False
    """Say that nobody but the peers of this swarm can read or change what travels between them: a
    VPC, a VPN, one room. Needed for links.security = "authenticated"."""

    @field_validator("listen", "announce")
    @classmethod
    def _multiaddrs(cls, addresses: list[str]) -> list[str]:
        for address in addresses:
            _parse("multiaddr", address)
        return addresses

    @field_validator("bootstrap")
    @classmethod
    def _bootstrap(cls, addresses: list[str]) -> list[str]:
        for address in addresses:
            if not _parse("multiaddr", address).peer_id:
                raise Misfit(f"{address}: names no peer", "/p2p/PEER_ID at the end")
        return addresses

    @field_validator("link_listen")
    @classmethod
    def _host_port(cls, address: str) -> str:
        _parse("host:port", address)
        return address

    @field_validator("link_announce")
    @classmethod
    def _host_ports(cls, addresses: list[str]) -> list[str]:
        for address in addresses:
            _parse("host:port", address)
        return addresses


class LinksSection(_Section):
    """The bulk links that carry tensors between two peers. Both peers must agree on `security`."""

    flows: int | str = "auto"
    """TCP connections per peer: 1 to 8, or "auto" for one, and more (up to 8) where the measured
    rate and round trip are more than one connection carries. The peer that dialled decides."""
    security: Literal["tls", "authenticated"] = "tls"
    """tls: encrypted and authenticated, every byte. authenticated: both peers prove who they are,
    then the stream goes on in plain TCP, faster, with a crc32 against accidents and nothing against
    people; only with network.trusted_network = true."""

    @field_validator("flows", mode="before")
    @classmethod
    def _number_of_flows(cls, flows: object) -> object:
        number = isinstance(flows, int) and not isinstance(flows, bool) and 1 <= flows <= FLOWS_MAX
        if flows != "auto" and not number:
            raise Misfit(f"{flows!r:.80} is refused", f'"auto", or a number from 1 to {FLOWS_MAX}')
        return flows


class LimitsSection(_Section):
    """What this peer may take of the network, all links together: a capped peer reduces less."""

    upload_mbps: float = Field(default=0.0, ge=0, le=1e6)
    """Megabit per second of TCP payload that the bulk links may send. 0: no cap."""
    download_mbps: float = Field(default=0.0, ge=0, le=1e6)
    """The same for what they receive."""


class _AveragingOwn(_Section):
    """How groups form and tensors travel. All peers of a run should agree on these."""

    codec: Literal[
        "float32", "float16", "bfloat16", "int8", "int4", "minmax-uint8", "qsgd", "natural",
        "nuqsgd", "bagua-minmax-uint8", "top-k", "rand-k", "sign-l1", "sign-rms", "auto",
    ] = "float16"  # fmt: skip
    """How float32 values travel; all others travel as they are. float16 takes half of the bytes,
    and what it rounds away comes with the next average. Those from nuqsgd to sign-rms need
    allow_no_error_feedback: averaged parameters would differ from the mean by their own size.
    auto: averages travel as float16, contributions as float16 or raw, whichever is faster by what
    was measured of each link; `status` says which and why. It and float16 may meet in one run."""
    error_feedback: bool = True
    """Keep what the codec took away and add it in the next round, both where values are sent and
    where they are averaged. Takes memory of up to twice the parameters. Without it every average
    rounds the parameters, and progress smaller than half a rounding step is lost for good."""
    allow_no_error_feedback: bool = False
    """Permit what error feedback does not mend: error_feedback = false with a codec other than
    float32, and codecs whose error it cannot keep below the size of the parameters."""
    part_bytes: int = Field(default=0, ge=0, le=1 << 26, multiple_of=64)
    """Size of a part, the unit of arithmetic and of loss; 4096 or more, and the same on all nodes
    of a run. 0: by the size of the model, 256 KiB, and 4 MiB from 256 MiB on."""
    topology_file: str = ""
    """TOML file with the PeerIDs that exchange with each other, for trainers that say
    topology = "own"; the same on all nodes (configs/topology.toml). Empty: there is no such
    topology here."""

    @field_validator("part_bytes")
    @classmethod
    def _part_bytes(cls, size: int) -> int:
        if 0 < size < MIN_PART_BYTES:
            raise Misfit(f"{size} bytes", f"0, or {MIN_PART_BYTES} and more")
        return size

    def params(self) -> Params:
        """The core's record of the same values."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(Params)}
        values["grid_sides"] = tuple(values["grid_sides"])
        return Params(**values)


def _core_field(default: Any, hint: Any) -> tuple[Any, Any]:
    """One field of core's Params as a setting. All are durations, sizes and counts, so above 0."""
    if hint == tuple[int, ...]:
        return list[int], Field(default=list(default), max_length=8)
    if hint is int:
        return hint, Field(default=default, ge=1)
    # A default of 0 means off, so 0 must be allowed there.
    return hint, Field(default=default, gt=0) if default else Field(default=default, ge=0)


if TYPE_CHECKING:
    AveragingSection = _AveragingOwn
else:
    # Derived, not repeated: a bound that is added to Params is a setting at once.
    AveragingSection = create_model(
        "AveragingSection",
        __base__=_AveragingOwn,
        __doc__=_AveragingOwn.__doc__,
        **{
            field.name: _core_field(field.default, get_type_hints(Params)[field.name])
            for field in fields(Params)
        },
    )


class RunsSection(_Section):
    """What this daemon keeps of runs that nobody trains here."""

    idle_s: float = Field(default=1800.0, ge=0, le=31_536_000)
    """How long a run without trainers is kept, for one that comes back: a copy of its parameters,
    what error feedback owes, and the trainer state. Half an hour is an operator's break, or the
    time to mend a script; later a trainer takes its state from another peer or from a checkpoint.
    The 65th run takes the place of the one that was longest without, at once, unless only this
    daemon is known to hold what was averaged in it. 0: a run is never let go, and the 65th is
    refused."""


class HttpSection(_Section):
    """A page for people and monitoring: /, /metrics, /healthz, /readyz. Read-only, open."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on. 0.0.0.0 lets a Prometheus on another machine in, and everybody else."""
    port: int = Field(default=9464, ge=0, le=65535)
    """TCP port. 0: no HTTP at all."""


class LogSection(_Section):
    """What is written to stderr, one line per event."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is written."""
    format: Literal["text", "json"] = "text"
    """text for people, json for collectors."""


class NoticesSection(_Section):
    """Notices that this machine will be taken away: a drain begins at once, within what is left."""

    provider: Literal["none", "auto", "aws", "gcp", "azure", "file"] = "auto"
    """Who says it. auto asks the metadata address of the three clouds at the start whether it is
    one of theirs. Without a notice a SIGTERM drains, too."""
    url: str = Field(default="", pattern="^(https?://.+)?$")
    """Metadata server. Empty: http://169.254.169.254, where all three clouds answer."""
    file: str = ""
    """With provider = file: the file whose appearance is the notice. It may hold the number of
    seconds that are left."""
    poll_s: float = Field(default=0.0, ge=0, le=60)
    """Time between two questions. 0: what the cloud recommends, 5 s (aws) or 1 s (azure, file);
    gcp answers by itself."""
    rebalance_drains: bool = False
    """Leave at a rebalance recommendation of AWS, too. It often comes hours before an interruption
    or without one, and leaving at once gives those hours away."""
    azure_events: list[Literal["Preempt", "Terminate", "Reboot", "Redeploy", "Freeze"]] = Field(
        default=["Preempt", "Terminate", "Reboot", "Redeploy"]
    )
    """Scheduled events of Azure to leave for. A Freeze of some seconds is slept through: others go
    on without this peer, and it catches up."""


class FlightSection(_Section):
    """The flight recorder: what happened, in data_dir/flight, for `moshpitd replay`."""

    file_bytes: int = Field(default=8 << 20, ge=1 << 16, le=1 << 30)
    """Size of one file. A healthy round leaves 0.7 kB (2 peers) to 1 kB (8 peers), so 8 MiB hold
    8,000 rounds: six days of one a minute."""
    files: int = Field(default=8, ge=0, le=10_000)
    """Files that are kept; with the default size 64 MiB in all. 0: nothing is recorded."""


@dataclass(frozen=True, slots=True)
class Paths:
    """Where things are, all absolute: `~` and the defaults that depend on the machine resolved."""

    data_dir: Path
    identity: Path
    buffers_dir: Path
    socket: Path


class Settings(BaseSettings):
    """All settings of one daemon.

    Invariant: `Settings(...)` is the defaults and its arguments, whatever the environment says;
    only `Settings.load` looks outside.
    """

    model_config = SettingsConfigDict(extra="forbid", strict=True, frozen=True)

    origins: ClassVar[tuple[Origin, ...]] = ()

    node: NodeSection = NodeSection()
    network: NetworkSection = NetworkSection()
    links: LinksSection = LinksSection()
    limits: LimitsSection = LimitsSection()
    averaging: AveragingSection = AveragingSection()
    runs: RunsSection = RunsSection()
    http: HttpSection = HttpSection()
    notices: NoticesSection = NoticesSection()
    flight: FlightSection = FlightSection()
    log: LogSection = LogSection()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return tuple(Source(settings_cls, origin) for origin in cls.origins) or (init_settings,)

    @classmethod
    def load(
        cls,
        config: Path | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        flags: Mapping[str, object] | None = None,
    ) -> Settings:
        """Settings from `config` (or the file that MOSHPITD_CONFIG names), the environment and
        `flags`, whose keys are dotted: `{"http.port": 0}`. Raises `ConfigError`."""
        environ = os.environ if environ is None else environ
        config = config or (Path(name) if (name := environ.get("MOSHPITD_CONFIG")) else None)
        origins = [Origin.flags(flags or {}), environment(cls, environ)]
        if config is not None:
            origins.append(toml_file(config))
        # A class of its own, because pydantic-settings asks the class where to look.
        loading = type("Loading", (cls,), {"origins": tuple(origins)})
        try:
            settings = cls(**loading().model_dump())
        except ValidationError as error:
            raise refusal(error, cls, origins) from None
        try:
            settings.check()
        except ConfigError as error:
            if error.file:  # it is about what a setting names, and says so
                raise
            file, key = next(
                ((o.name, o.written(error.key)) for o in origins if o.holds(error.key)),
                (str(config or ""), error.key),
            )
            raise ConfigError(error.message, file=file, key=key, expected=error.expected) from None
        return settings

    def own_topology(self) -> PeerGraph | None:
        """What the topology file says, if there is one. Raises `ConfigError`."""
        name, most = self.averaging.topology_file, self.averaging.params().max_group
        return read_topology(Path(name), max_peers=most) if name else None

    def check(self) -> None:
        """Raise `ConfigError` (dotted key) for values that do not fit together."""
        try:
            self.averaging.params().check()
        except ConfigError as error:
            raise ConfigError(
                error.message, key=f"averaging.{error.key}", expected=error.expected
            ) from None
        if self.notices.provider == "file" and not self.notices.file:
            raise ConfigError(
                "no file is named", key="notices.file", expected="a path, with provider = file"
            )
        if self.links.security != "tls" and not self.network.trusted_network:
            raise ConfigError(
                "anybody on the path could change the values of such links unseen",
                key="links.security",
                expected='"tls", or network.trusted_network = true beside it',
            )
        self._check_codec()
        self.own_topology()
        for finding in self.findings():
            if finding.fatal:
                raise ConfigError(
                    f"{finding.address}: {finding.reason}",
                    key=finding.key,
                    expected="an address that another peer can dial",
                )
        socket = str(self.paths().socket)
        if len(os.fsencode(socket)) > MAX_SOCKET_BYTES:
            raise ConfigError(
                f"{socket} is too long for a Unix socket",
                key="node.socket",
                expected=f"a path of at most {MAX_SOCKET_BYTES} bytes",
            )

    def _check_codec(self) -> None:
        codec, averaging = group_codec(self.averaging.codec), self.averaging
        if codec == LOSSLESS or averaging.allow_no_error_feedback:
            return
        beside = "or averaging.allow_no_error_feedback = true beside it"
        if codec not in FED:
            raise ConfigError(
                f"{codec} changes parameters by their own size, also with error feedback",
                key="averaging.codec",
                expected=f"one of {', '.join((LOSSLESS, *FED))}, {beside}",
            )
        if not averaging.error_feedback:
            raise ConfigError(
                f"{codec} without error feedback rounds the parameters in every average",
                key="averaging.error_feedback",
                expected=f"true, or averaging.codec = {LOSSLESS!r}, {beside}",
            )

    def findings(self) -> list[Finding]:
        """What is wrong or doubtful with the addresses; after `check` only the doubtful is left."""
        network = self.network
        return address_warnings(
            listen=network.listen,
            announce=network.announce,
            bootstrap=network.bootstrap,
            link_listen=network.link_listen,
            link_announce=network.link_announce,
        )

    def paths(self) -> Paths:
        """Where this daemon's files are."""
        data_dir = _absolute(self.node.data_dir)
        memory = Path("/dev/shm")
        in_memory = memory.is_dir() and os.access(memory, os.W_OK)
        return Paths(
            data_dir=data_dir,
            identity=_absolute(self.node.identity or str(data_dir / "identity.key")),
            buffers_dir=_absolute(self.node.buffers_dir or str(memory if in_memory else data_dir)),
            socket=_absolute(self.node.socket or str(default_socket())),
        )


def _absolute(text: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(text)))


def _parse(form: Literal["multiaddr", "host:port"], text: str) -> Any:
    parse, example = (
        (parse_multiaddr, "a multiaddr, e.g. /ip4/198.51.100.7/tcp/31337")
        if form == "multiaddr"
        else (parse_host_port, "HOST:PORT, e.g. 198.51.100.7:31338")
    )
    try:
        return parse(text)
    except ValueError as error:
        raise Misfit(f"{text}: {error}", example) from None
