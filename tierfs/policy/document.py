"""A policy file as YAML nodes that know their line and key path, so that every mistake can name both.

The only importer of yaml in the product; nodes are composed, never constructed. Every mistake is a ConfigError
``FILE:LINE: KEYPATH: what is wrong; what to do``.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import yaml

from tierfs.errors import ConfigError

TOP = "(file)"

_PASSWORD = re.compile(r"(//[^/@\s]*?:)[^/@\s]*@")

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class At:
    """A value in the file: its node, its key path ("" at the top) and the line of its key."""

    source: str
    path: str
    line: int
    node: yaml.Node

    def error(self, problem: str, remedy: str, *, key: str = "", line: int = 0) -> ConfigError:
        path = ".".join(part for part in (self.path, key) if part)
        return error_at(self.source, line or self.line, path or TOP, problem, remedy)

    def mapping(
        self, valid: Collection[str] | None = None, unsupported: Mapping[str, str] | None = None
    ) -> dict[str, At]:
        """The entries by key; keys outside ``valid`` (None: any) are refused, ``unsupported`` ones with a remedy."""
        if not isinstance(self.node, yaml.MappingNode):
            raise self.error(f"must be a mapping, not {self.kind()}", "write KEY: VALUE entries below it")
        entries: dict[str, At] = {}
        for key_node, value in self.node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != "tag:yaml.org,2002:str":
                shown = quote(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
                remedy = f"use one of {listed(valid)}" if valid else "write a name, in quotes where YAML needs them"
                raise self.error(f"the key {shown} is not a name", remedy, line=line)
            name = str(key_node.value)
            if name in entries:
                raise self.error(
                    f"is a duplicate key, first given on line {entries[name].line}",
                    "remove one",
                    key=_shown(name),
                    line=line,
                )
            entries[name] = At(self.source, f"{self.path}.{_shown(name)}".lstrip("."), line, value)
        if valid is not None:
            for name, at in entries.items():
                if unsupported and name in unsupported:
                    raise at.error(f"{name} is not supported in this version", unsupported[name])
                if name not in valid:
                    raise at.error("unknown key", nearest(name, valid))
        return entries

    def items(self) -> list[At]:
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.error(f"must be a list, not {self.kind()}", "write it as [A, B] or one '- ' entry per line")
        return [
            At(self.source, f"{self.path}[{i}]", node.start_mark.line + 1, node)
            for i, node in enumerate(self.node.value)
        ]

    def kind(self) -> str:
        """What the value is, in words."""
        if isinstance(self.node, yaml.MappingNode):
            return "a mapping"
        if isinstance(self.node, yaml.SequenceNode):
            return "a list"
        names = {"null": "empty", "int": "a number", "float": "a number", "bool": "a boolean", "str": "text"}
        name = names.get(self.node.tag.rpartition(":")[2], "a value with a tag")
        return name if name in ("empty", "text") else f"{name} ({quote(self.node.value)})"

    def is_mapping(self) -> bool:
        return isinstance(self.node, yaml.MappingNode)

    def is_sequence(self) -> bool:
        return isinstance(self.node, yaml.SequenceNode)

    def is_scalar(self, *tags: str) -> bool:
        return isinstance(self.node, yaml.ScalarNode) and self.node.tag in {f"tag:yaml.org,2002:{tag}" for tag in tags}

    def text(self, remedy: str) -> str:
        if not self.is_scalar("str"):
            raise self.error(f"must be text, not {self.kind()}", remedy)
        return str(self.node.value)

    def boolean(self) -> bool:
        value = str(self.node.value).lower()
        if not self.is_scalar("bool") or value not in ("true", "false", "yes", "no", "on", "off"):
            raise self.error(f"must be true or false, not {self.kind()}", "write true or false without quotes")
        return value in ("true", "yes", "on")

    def integer(self, low: int, high: int) -> int:
        value = str(self.node.value)
        if not self.is_scalar("int") or not re.fullmatch(r"-?(0|[1-9][0-9]{0,17})", value):
            raise self.error(f"must be a whole number, not {self.kind()}", f"write a number from {low} to {high}")
        if not low <= int(value) <= high:
            raise self.error(f"{value} is out of range", f"write a number from {low} to {high}")
        return int(value)

    def choice(self, choices: Collection[str]) -> str:
        value = self.text(f"use one of {listed(choices)}")
        if value not in choices:
            raise self.error(f"{quote(value)} is not a valid value", nearest(value, choices))
        return value

    def unit(self, parse: Callable[[str], _T], what: str, example: str) -> _T:
        """The value as ``parse`` (of tierfs.units) reads it; a bare number is passed on as it is written."""
        if not self.is_scalar("str", "int", "float"):
            raise self.error(f"must be a {what}, not {self.kind()}", f"write for example {example}")
        value = str(self.node.value)
        try:
            return parse(value)
        except ValueError as error:
            problem = error
        if (shown := without_password(value)) != value:
            problem = ValueError(f"{quote(shown)} is no {what}; write for example {example}")
        raise error_of(self, problem) from None

    def directory(self) -> Path:
        value = self.text("write an absolute path")
        try:
            usable = b"\0" not in os.fsencode(value)
        except UnicodeEncodeError:
            usable = False
        if not usable:
            raise self.error("holds a character that no path can hold", "correct the path")
        if not value.startswith("/"):
            raise self.error(f"{quote(value)} is not an absolute path", "write the path from '/' on")
        return Path(value)


def compose(text: str, source: str) -> At:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(part for part in (error.context, error.problem) if part).replace("\n", " ")
        remedy = "correct the YAML"
        if "alias" in problem or "anchor" in problem:
            remedy = 'put patterns that begin with * in quotes, such as "**/*.pt"'
        elif "\\t" in problem:
            remedy = "indent with spaces, not tabs"
        raise error_at(source, mark.line + 1 if mark else 1, TOP, f"is not valid YAML ({problem})", remedy) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise error_at(source, line, TOP, "holds a character that YAML does not allow", "remove it") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise error_at(source, 1, TOP, f"is not valid YAML ({error})", "correct the YAML") from None
    except RecursionError:
        raise error_at(source, 1, TOP, "is nested too deeply", "a policy needs four levels at most") from None
    if node is None:
        raise error_at(source, 1, TOP, "is empty", "write at least tiers: a fast one and the archive")
    return At(source, "", node.start_mark.line + 1, node)


def error_at(source: str, line: int, key: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError(without_password(f"{source}:{line}: {key}: {problem}; {remedy}"))


def error_of(at: At, error: ValueError) -> ConfigError:
    problem, _, remedy = str(error).partition("; ")
    return at.error(problem, remedy)


def nearest(name: str, valid: Collection[str]) -> str:
    near = difflib.get_close_matches(name[:64].lower(), valid, n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else f"use one of {listed(valid)}"


def listed(names: Collection[str]) -> str:
    return ", ".join(names)


def without_password(text: str) -> str:
    """The text with the password of each URL in it blotted out."""
    return _PASSWORD.sub(r"\1***@", text)


def quote(value: object) -> str:
    """A value from the file as messages show it: short, and without the password of a URL."""
    text = without_password(str(value))
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _shown(name: str) -> str:
    """A key as it appears in a key path: as it is when harmless, quoted and cut otherwise."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]{1,40}", name) else quote(name)
