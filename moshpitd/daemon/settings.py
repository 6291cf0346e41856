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

from moshpitd.core.params import Params
from moshpitd.daemon.addresses import Finding, address_warnings, parse_host_port, parse_multiaddr
from moshpitd.daemon.settings_sources import Misfit, Origin, Source, environment, refusal, toml_file
from moshpitd.errors import ConfigError
from moshpitd.rpc.channel import MAX_SOCKET_BYTES, default_socket

LOSSLESS = "float32"
FED = ("float16", "bfloat16", "int8", "int4", "minmax-uint8", "qsgd", "natural")
"""Codecs that may average parameters, with error feedback: the residual that it keeps never exceeds
what is sent. That is sqrt(1 - delta) / (1 - sqrt(1 - delta)) <= 1 for the codec's contraction delta
(0.0005 for float16, 0.14 for int8, 0.97 for int4, 3.8 for nuqsgd, 198 for top-k). A test compares,
because settings may not import the codecs: they would bring torch."""


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
    """Upload rate of this machine in megabit per second: a slower peer reduces less."""
    down_mbps: float = Field(default=1000.0, gt=0, le=1e6)
    """Download rate, likewise."""

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


class _AveragingOwn(_Section):
    """How groups form and tensors travel. All peers of a run should agree on these."""

    codec: Literal[
        "float32", "float16", "bfloat16", "int8", "int4", "minmax-uint8", "qsgd", "natural",
        "nuqsgd", "bagua-minmax-uint8", "top-k", "rand-k", "sign-l1", "sign-rms",
    ] = "float16"  # fmt: skip
    """How float32 values travel; all others travel as they are. float16 takes half of the bytes,
    and what it rounds away comes with the next average. Those from nuqsgd on need
    allow_no_error_feedback: averaged parameters would differ from the mean by their own size."""
    error_feedback: bool = True
    """Keep what the codec took away and add it in the next round, both where values are sent and
    where they are averaged. Takes memory of up to twice the parameters. Without it every average
    rounds the parameters, and progress smaller than half a rounding step is lost for good."""
    allow_no_error_feedback: bool = False
    """Permit what error feedback does not mend: error_feedback = false with a codec other than
    float32, and codecs whose error it cannot keep below the size of the parameters."""
    part_bytes: int = Field(default=1 << 20, ge=4096, le=1 << 26, multiple_of=64)
    """Size of a part, the unit of arithmetic and of loss."""

    def params(self) -> Params:
        """The core's record of the same values."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(Params)}
        values["grid_sides"] = tuple(values["grid_sides"])
        return Params(**values)


def _core_field(default: Any, hint: Any) -> tuple[Any, Any]:
    """One field of core's Params as a setting. All are durations, sizes and counts, so above 0."""
    if hint == tuple[int, ...]:
        return list[int], Field(default=list(default), max_length=8)
    return hint, Field(default=default, ge=1) if hint is int else Field(default=default, gt=0)


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
    averaging: AveragingSection = AveragingSection()
    http: HttpSection = HttpSection()
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
            file, key = next(
                ((o.name, o.written(error.key)) for o in origins if o.holds(error.key)),
                (str(config or ""), error.key),
            )
            raise ConfigError(error.message, file=file, key=key, expected=error.expected) from None
        return settings

    def check(self) -> None:
        """Raise `ConfigError` (dotted key) for values that do not fit together."""
        try:
            self.averaging.params().check()
        except ConfigError as error:
            raise ConfigError(
                error.message, key=f"averaging.{error.key}", expected=error.expected
            ) from None
        self._check_codec()
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
        codec, averaging = self.averaging.codec, self.averaging
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
