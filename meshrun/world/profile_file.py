"""A site's profile as a file: read and checked, and written so that people can edit it.

    site = from_document("juwels-booster", tomllib.loads(text))
    to_text(site)                                        # TOML with a comment on each key

A file says each value with its source and whether it is verified; what is not known is left out of it:

    title = "JUWELS Booster (JSC)"

    [detect]                                             # any one that matches says: this is the site
    host = ['^jwlogin2\\d']                              # of this machine's short name
    cluster = ['^juwels$']                               # of Slurm's ClusterName
    environment = { SYSTEMNAME = '^juwelsbooster$' }
    source = "…"
    verified = false

    [gpus_per_node]                                      # likewise every other key of KEYS
    value = 4
    source = "https://…"                                 # a page, a job script, a command on this machine
    verified = true                                      # whether a page of the site itself says so

    [[partitions]]
    name = "booster"                                     # max_time, gpus_per_node, nodes, note where they are known
    max_time = "1-00:00:00"
    …source and verified

    [environment.NCCL_SOCKET_IFNAME]                     # exported in the job script, with its reason above it
    value = "ib0"                                        # stands between double quotes: ${NAME} is expanded there
    reason = "…"
    …source and verified

    [[srun]]                                             # a flag for the step that trains
    value = "--cpu-bind=none"
    reason = "…"
    …source and verified

Nothing in a profile can become shell code: a value is refused unless it is a number, a word without characters of the
shell, or a text that is safe between double quotes.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshrun.errors import UserError
from meshrun.world import walltime
from meshrun.world.profile import KEYS, Detect, Partition, Site, Value


def from_document(name: str, document: dict[str, Any], path: Path | None = None) -> Site:
    """A profile from what its file says; each thing that cannot be is refused by name."""
    where = f"site profile {path or name}"
    if not _NAME.fullmatch(name):
        raise UserError(f"{where} is called {name!r}; a site's name has letters, digits, dots and dashes only")
    known = [*KEYS, "title", "detect", "partitions", "environment", "srun"]
    for key in document:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}" if near else f"it may have {', '.join(known)}"
            raise UserError(f"{where} has the unknown key {key!r}; {hint}")
    environment = _of(dict, document.get("environment", {}), f"{where}: environment")
    for variable in environment:
        if not _VARIABLE.fullmatch(variable):
            raise UserError(f"{where} exports {variable!r}, which is no name of an environment variable")
    return Site(
        name,
        _text(document.get("title", name), f"{where}: title"),
        {key: _value(document[key], f"{where}: {key}", _CHECKS[key]) for key in KEYS if key in document},
        tuple(
            _partition(entry, f"{where}: partition {at}")
            for at, entry in enumerate(_of(list, document.get("partitions", []), f"{where}: partitions"), 1)
        ),
        {
            variable: _value(entry, f"{where}: environment {variable}", _exported)
            for variable, entry in environment.items()
        },
        tuple(
            _value(entry, f"{where}: srun {at}", _flag)
            for at, entry in enumerate(_of(list, document.get("srun", []), f"{where}: srun"), 1)
        ),
        _detect(document.get("detect", {}), f"{where}: detect"),
        path,
    )


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORD = re.compile(r"[A-Za-z0-9_.,:+@%/=-]+")
_FEATURES = re.compile(r"[A-Za-z0-9_.,:&|()\[\]*+-]+")
_IN_DOUBLE_QUOTES = re.compile(r"(?:[^\"\\`$]|\$\{[A-Za-z_][A-Za-z0-9_]*\})*")
"""What stays text between double quotes in a shell, but for plain variables."""

Check = Callable[[Any, str], Any]


def _value(entry: Any, where: str, check: Check) -> Value:
    table = _table(entry, where, ("value", "source", "verified", "reason"))
    if "value" not in table:
        raise UserError(f"{where} has no value; give it value, source and verified")
    return Value(
        check(table["value"], where),
        _text(table.get("source", ""), f"{where}: source"),
        _of(bool, table.get("verified", False), f"{where}: verified"),
        _text(table.get("reason", ""), f"{where}: reason"),
    )


def _partition(entry: Any, where: str) -> Partition:
    table = _table(
        entry, where, ("name", "max_time", "gpus_per_node", "nodes", "default", "note", "source", "verified")
    )
    if "name" not in table:
        raise UserError(f"{where} has no name")
    if "max_time" in table:
        try:
            walltime.parse(_text(table["max_time"], f"{where}: max_time"))
        except ValueError as error:
            raise UserError(f"{where}: max_time {error}") from None
    for key in ("gpus_per_node", "nodes"):
        if key in table:
            _count(table[key], f"{where}: {key}")
    for key in ("default", "verified"):
        _of(bool, table.get(key, False), f"{where}: {key}")
    for key in ("note", "source"):
        _text(table.get(key, ""), f"{where}: {key}")
    return Partition(**{**table, "name": _word(table["name"], f"{where}: name")})


def _detect(entry: Any, where: str) -> Detect:
    table = _table(entry, where, ("host", "cluster", "environment", "source", "verified"))
    environment = _of(dict, table.get("environment", {}), f"{where}: environment")
    lists = {key: _of(list, table.get(key, []), f"{where}: {key}") for key in ("host", "cluster")}
    for pattern in (*lists["host"], *lists["cluster"], *environment.values()):
        try:
            re.compile(_text(pattern, where))
        except (re.error, RecursionError, OverflowError) as error:
            raise UserError(f"{where}: {pattern!r:.80} is not a regular expression: {error}") from None
    return Detect(
        tuple(lists["host"]),
        tuple(lists["cluster"]),
        environment,
        table.get("source", ""),
        table.get("verified", False),
    )


def _table(entry: Any, where: str, known: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise UserError(f"{where} is {entry!r}; it must be a table with {', '.join(known)}")
    for key in entry:
        if key not in known:
            raise UserError(f"{where} has the unknown key {key!r}; it may have {', '.join(known)}")
    return entry


def _of(kind: type, value: Any, where: str) -> Any:
    called = {dict: "a table", list: "a list", bool: "true or false"}[kind]
    if not isinstance(value, kind):
        raise UserError(f"{where} is {value!r}; it must be {called}")
    return value


def _text(value: Any, where: str) -> str:
    # A line break or another control character could end a comment or a line of a job script.
    if not isinstance(value, str) or not value.isprintable():
        raise UserError(f"{where} is {value!r}; it must be a text of one line")
    return value


def _word(value: Any, where: str) -> str:
    if not _WORD.fullmatch(_text(value, where)):
        raise UserError(f"{where} is {value!r}; it must be one word without quotes, spaces or characters of the shell")
    return value


def _constraint(value: Any, where: str) -> str:
    if not _FEATURES.fullmatch(_text(value, where)):
        raise UserError(f"{where} is {value!r}; it must be a node feature, or several as Slurm combines them")
    return str(value)


def _flag(value: Any, where: str) -> str:
    if not _word(value, where).startswith("--"):
        raise UserError(f"{where} is {value!r}; it must be one flag such as --cpu-bind=none")
    return value


def _exported(value: Any, where: str) -> str:
    if not _IN_DOUBLE_QUOTES.fullmatch(_text(value, where)):
        raise UserError(
            f"{where} is {value!r}; it may have variables as ${{NAME}}, but no quotes, backslash or other $"
        )
    return value


def _count(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UserError(f"{where} is {value!r}; it must be a whole number of at least 0")
    return value


def _truth(value: Any, where: str) -> bool:
    return bool(_of(bool, value, where))


def _gpu_request(value: Any, where: str) -> str:
    if value != "none" and _flag(_text(value, where).replace("{n}", "", 1), where) == value:
        raise UserError(f"{where} is {value!r}; it must be a flag with {{n}} such as --gres=gpu:{{n}}, or none")
    return str(value)


def _chain(value: Any, where: str) -> str:
    if value not in ("requeue", "submit"):
        raise UserError(f"{where} is {value!r}; it must be requeue or submit")
    return str(value)


def _masks(value: Any, where: str) -> tuple[str, ...]:
    for mask in _of(list, value, where):
        if not isinstance(mask, str) or not re.fullmatch("(0x)?[0-9A-Fa-f]+", mask):
            raise UserError(f"{where} has {mask!r}; it must be a mask in hexadecimal digits")
    return tuple(value)


def _modules(value: Any, where: str) -> tuple[str, ...]:
    for line in _of(list, value, where):
        words = _text(line, where).split(" ")
        if words[0] not in ("module", "ml") or not all(_WORD.fullmatch(word) for word in words):
            raise UserError(f"{where} has {line!r}; it must be a line such as 'module load Python/3.12'")
    return tuple(value)


_CHECKS: dict[str, Check] = {
    **dict.fromkeys(KEYS, _word),
    **dict.fromkeys(("gpus_per_node", "cores_per_node", "threads_per_core", "cores_per_gpu"), _count),
    **dict.fromkeys(("needs_account", "exclusive", "internet"), _truth),
    **dict.fromkeys(("gpu", "monitor", "node_folder", "scratch_note"), _text),
    "constraint": _constraint,
    "gpu_request": _gpu_request,
    "chain": _chain,
    "cpu_masks": _masks,
    "modules": _modules,
}


def to_text(site: Site) -> str:
    """The profile as TOML, with a comment above each key on what it is."""
    lines = [
        f"# What meshrun knows about {site.title}. Edit it freely: source and verified are for people.",
        f"title = {json.dumps(site.title, ensure_ascii=False)}",
    ]
    found = site.detect
    if found.host or found.cluster or found.environment:
        environment = ", ".join(f"{name} = {_toml(pattern)}" for name, pattern in found.environment.items())
        lines += [
            "\n# Any one of these that matches says: this is the site.\n[detect]",
            f"host = {_toml(found.host)}\ncluster = {_toml(found.cluster)}\nenvironment = {{ {environment} }}",
            *_source(found.source, found.verified),
        ]
    for key, value in site.values.items():
        lines += [f"\n# {KEYS[key]}\n[{key}]", *_said(value)]
    for each in site.partitions:
        facts = {"name": each.name, "max_time": each.max_time, "gpus_per_node": each.gpus_per_node, "nodes": each.nodes}
        more = {"default": each.default or None, "note": each.note or None}
        known = {name: fact for name, fact in {**facts, **more}.items() if fact is not None}
        lines += ["\n[[partitions]]", *(f"{name} = {_toml(fact)}" for name, fact in known.items())]
        lines += _source(each.source, each.verified)
    for name, value in site.environment.items():
        lines += [f"\n[environment.{name}]", *_said(value)]
    for value in site.srun:
        lines += ["\n[[srun]]", *_said(value)]
    return "\n".join(lines) + "\n"


def _said(value: Value) -> list[str]:
    reason = [f"reason = {_toml(value.reason)}"] if value.reason else []
    return [f"value = {_toml(value.value)}", *reason, *_source(value.source, value.verified)]


def _source(source: str, verified: bool) -> list[str]:
    return [f"source = {_toml(source)}", f"verified = {_toml(verified)}"]


def _toml(value: Any) -> str:
    """A value that is a text, a number, a truth or a list of these: JSON writes them as TOML does."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
