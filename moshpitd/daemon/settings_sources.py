"""Where setting values come from, and how one is named when it is wrong.

One rule: every value remembers who wrote it, so that an error points at the line to change and not
at the merged result.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from moshpitd.errors import ConfigError

ENV_PREFIX = "MOSHPITD_"
ENV_NESTED = "__"


class Misfit(ValueError):
    """What our validators raise: pydantic carries it, and `refusal` finds both words again."""

    def __init__(self, problem: str, expected: str) -> None:
        super().__init__(problem)
        self.expected = expected


@dataclass(frozen=True, slots=True)
class Origin:
    """One source: its name for the operator, its nested values, and how it spells a dotted key
    where that is not as in TOML."""

    name: str
    values: dict[str, Any]
    spelling: Mapping[str, str]

    @classmethod
    def flags(cls, flags: Mapping[str, object]) -> Origin:
        values: dict[str, Any] = {}
        for dotted, value in flags.items():
            section, _, key = dotted.partition(".")
            values.setdefault(section, {})[key] = value
        return cls("command line", values, {})

    def holds(self, dotted: str) -> bool:
        """Whether this source sets `dotted` (a section, or a key of one)."""
        at: Any = self.values
        for word in dotted.split("."):
            if not isinstance(at, dict) or word not in at:
                return False
            at = at[word]
        return True

    def written(self, dotted: str) -> str:
        return self.spelling.get(dotted, dotted)


class Source(PydanticBaseSettingsSource):
    """An `Origin` in the form that pydantic-settings merges."""

    def __init__(self, settings_cls: type[BaseSettings], origin: Origin) -> None:
        super().__init__(settings_cls)
        self._values = origin.values

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self._values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self._values


def toml_file(path: Path) -> Origin:
    """The file's values, unchecked. Raises `ConfigError` when it cannot be read or is not TOML."""
    try:
        text = path.read_bytes().decode("utf-8")
        return Origin(str(path), tomllib.loads(text), {})
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(reason, file=str(path), expected="a readable TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"byte {error.start} is not UTF-8", file=str(path), expected="TOML in UTF-8"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(error), file=str(path), expected="TOML") from None


def environment(settings: type[BaseSettings], environ: Mapping[str, str]) -> Origin:
    """Every MOSHPITD_SECTION__KEY.

    Names without the double underscore are not settings and are left alone: a cluster that has a
    service called moshpitd puts MOSHPITD_PORT and MOSHPITD_SERVICE_HOST into every container.
    """
    values: dict[str, Any] = {}
    spelling: dict[str, str] = {}
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX) or ENV_NESTED not in name:
            continue
        section, _, key = name[len(ENV_PREFIX) :].lower().partition(ENV_NESTED)
        spelling[f"{section}.{key}"] = spelling[section] = name
        annotation = _annotation(settings, section, key)
        values.setdefault(section, {})[key] = from_text(environ[name], annotation)
    return Origin("environment", values, spelling)


def flag_value(settings: type[BaseSettings], dotted: str, text: str) -> Any:
    """The value of `--set dotted=text`."""
    section, _, key = dotted.partition(".")
    return from_text(text, _annotation(settings, section, key))


def from_text(text: str, annotation: Any) -> Any:
    """The TOML value that `text` stands for under a key of this type; `text` itself where it stands
    for none, so that validation says what was expected. Lists may be written with commas: a,b."""
    if annotation in (int, float, bool, int | str):  # the last: a number or a word
        return _toml_value(text, text)
    item = next(iter(get_args(annotation)), None) if _is_list(annotation) else None
    if item is None:
        return text
    if text.lstrip().startswith("["):
        return _toml_value(text, text)
    return [from_text(word.strip(), item) for word in text.split(",") if word.strip()]


def refusal(
    error: ValidationError, settings: type[BaseSettings], origins: Sequence[Origin]
) -> ConfigError:
    """The first thing that pydantic found, in our words: whose, which key, what was expected."""
    first = error.errors(include_url=False)[0]
    words = [str(word) for word in first["loc"]]
    dotted = ".".join(words[:2])
    origin = next((o for o in origins if o.holds(dotted)), Origin("", {}, {}))
    key = origin.written(dotted) + "".join(f"[{index}]" for index in words[2:])
    message, expected = _message(first, settings, words)
    return ConfigError(message, file=origin.name, key=key, expected=expected)


def _message(
    first: Mapping[str, Any], settings: type[BaseSettings], words: list[str]
) -> tuple[str, str]:
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, Misfit):
        return str(cause), cause.expected
    if first["type"] == "extra_forbidden":
        known = _known(settings, words)
        near = difflib.get_close_matches(words[-1], known, n=1)
        kind = "unknown section" if len(words) == 1 else "unknown key"
        return kind, f"{near[0]}?" if near else f"one of {', '.join(known)}"
    if first["type"] in ("model_type", "model_attributes_type"):
        return f"{_short(first['input'])} is not a section", f"keys under [{words[-1]}]"
    return f"{_short(first['input'])} is refused", first["msg"].removeprefix("Input should be ")


def _known(settings: type[BaseSettings], words: list[str]) -> list[str]:
    section = _section(settings, words[0]) if len(words) > 1 else None
    return list((section or settings).model_fields)


def _annotation(settings: type[BaseSettings], section: str, key: str) -> Any:
    """The type of a key; None where there is no such key, which validation refuses by name."""
    model = _section(settings, section)
    found = model.model_fields.get(key) if model else None
    return found.annotation if found else None


def _section(settings: type[BaseSettings], name: str) -> type[BaseModel] | None:
    field = settings.model_fields.get(name)
    model: Any = field.annotation if field else None
    return model if isinstance(model, type) and issubclass(model, BaseModel) else None


def _is_list(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is list


def _toml_value(text: str, otherwise: Any) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return otherwise
    return parsed["value"] if len(parsed) == 1 else otherwise


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
