"""YAML file and command-line flags -> :class:`TrainConfig`; every value checked against its field's type."""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from loongforge.train import config as config_module
from loongforge.train.config import TrainConfig
from loongforge.train.errors import ConfigError, require_packages

_KIND_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list"}
SECTIONS: dict[str, type] = typing.get_type_hints(TrainConfig)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field, named as the field; a flag that is not given leaves no trace in the namespace."""
    for section, section_class in SECTIONS.items():
        group = parser.add_argument_group(section, inspect.getdoc(section_class))
        sentences = _field_sentences(section_class)
        for entry, hint in _typed_fields(section_class):
            kind, choices = _kind(hint)
            options: dict[str, Any] = {"dest": entry.name, "default": argparse.SUPPRESS, "help": sentences[entry.name]}
            if kind is bool:
                options["action"] = argparse.BooleanOptionalAction
            elif kind is list:
                options.update(nargs="+", metavar="ITEM")
            else:
                options.update(type=kind, choices=choices, metavar=None if choices else kind.__name__.upper())
            group.add_argument(f"--{entry.name.replace('_', '-')}", **options)


def load_config(path: str | Path, overrides: Mapping[str, Any]) -> TrainConfig:
    """Read ``path`` and let ``overrides`` (field name -> value) win; :class:`ConfigError` says what is wrong."""
    tree = _read_yaml(Path(path))
    section_of = {entry.name: name for name, cls in SECTIONS.items() for entry in fields(cls)}
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for name, content in tree.items():
        if name not in SECTIONS:
            hint = f"; it belongs in section {section_of[name]}" if name in section_of else _closest(name, SECTIONS)
            raise ConfigError(f"{path}: unknown section {name!r}{hint}")
        if content is not None and not isinstance(content, dict):
            raise ConfigError(f"{path}: section {name} must hold keys with values, got {content!r}")
        for key, value in (content or {}).items():
            if section_of.get(key) != name:
                known = [entry.name for entry in fields(SECTIONS[name])]
                hint = f"; it belongs in section {section_of[key]}" if key in section_of else _closest(key, known)
                raise ConfigError(f"{path}: unknown key {key!r} in section {name}{hint}")
            sections[name][key] = value
    for key, value in overrides.items():
        sections[section_of[key]][key] = value
    return TrainConfig(**{name: _build_section(name, content, path) for name, content in sections.items()})


def _read_yaml(path: Path) -> dict[str, Any]:
    require_packages("yaml", extra="train")
    import yaml

    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist; configs/ of the repository holds examples") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise ConfigError(f"config file {path} cannot be read as YAML: {problem}; configs/ holds examples") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"config file {path} must hold the sections {', '.join(SECTIONS)}, got {tree!r}")
    return tree


def _build_section(section: str, content: dict[str, Any], path: str | Path) -> Any:
    section_class = SECTIONS[section]
    values, missing = {}, []
    for entry, hint in _typed_fields(section_class):
        if entry.name in content:
            values[entry.name] = _typed(entry.name, content[entry.name], hint)
        elif entry.default is MISSING and entry.default_factory is MISSING:
            missing.append(entry.name)
    if missing:
        raise ConfigError(f"{path}: section {section} must set {', '.join(missing)}")
    return section_class(**values)


def _typed(name: str, value: Any, hint: Any) -> Any:
    """``value`` as the field's type; YAML 1.1 reads 1e-3 as text, so text that spells a number counts as one."""
    kind, choices = _kind(hint)
    if value is None and type(None) in typing.get_args(hint):
        return None
    if kind is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            value = float(value)
    if kind is list and isinstance(value, str):
        value = value.split()
    if kind is list and isinstance(value, list):
        return [str(item) for item in value]
    if type(value) is not kind or (choices and value not in choices):
        expected = f"one of {', '.join(choices)}" if choices else _KIND_NAMES[kind]
        raise ConfigError(f"{name} must be {expected}, got {value!r}")
    return value


def _kind(hint: Any) -> tuple[type, tuple[str, ...] | None]:
    """``Literal["a", "b"] | None`` -> (str, ("a", "b")); ``list[str]`` -> (list, None); ``int`` -> (int, None)."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = (option for option in typing.get_args(hint) if option is not type(None))
    if typing.get_origin(hint) is typing.Literal:
        return str, typing.get_args(hint)
    return typing.get_origin(hint) or hint, None


def _typed_fields(section_class: type) -> Iterator[tuple[Field, Any]]:
    hints = typing.get_type_hints(section_class, vars(config_module))
    return ((entry, hints[entry.name]) for entry in fields(section_class))


def _field_sentences(section_class: type) -> dict[str, str]:
    """The string literal under each field, which Python itself drops."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(section_class))).body
    assert isinstance(definition, ast.ClassDef)
    sentences = {}
    for statement, follower in itertools.pairwise(definition.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(follower, ast.Expr):
            sentences[ast.unparse(statement.target)] = ast.literal_eval(follower.value).replace("%", "%%")
    return sentences


def _closest(name: str, known: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"
