"""A recipe: the YAML that teaches how an application saves and goes on.

The shipped ones are in templates/recipes; a person's own outrank them. Only the login node reads
YAML: into chain.json, and so to the node, a recipe goes as plain JSON.
"""

# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import resources
from ..errors import SpecError
from ..settings import merge
from .base import Work
from .ingredients import Also, Edit, Number, Request, RestartFiles, Sane, Test, Unasked, Value
from .invocation import Invocation, find, goes_to, is_repeated, is_run
from .reader import Reader
from .texts import beginnings, mentions, named_files

NOT_RUN = "not run here"
BUILT_IN = frozenset(
    ("program", "python", "restart", "pid", "output", "hours_left", "minutes_left", "seconds_left",
     "time_left", "steps_left")
)  # fmt: skip
_KEYS = ("name", "title", "tried", "note", "like", "recognise", "values", "restart", "also",
         "first", "resume", "save", "complete", "progress", "sane")  # fmt: skip
_TAKEN = ("auto", "model", "application", "system", "dmtcp", "criu", "plain")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")
PROJECT = "recipes"
"""The folder of a project's own."""


@dataclass(frozen=True)
class Recognised:
    """How a command shows that it is of this kind; nothing: only by the recipe's name."""

    programs: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    """Each in one file that the command names."""
    needs: tuple[tuple[str, str], ...] = ()
    """The same, of a command that is recognised: without them it cannot go on; and what each is."""
    refuses: tuple[tuple[str, str], ...] = ()
    """Words, or rows of them, with which a call cannot be saved by this recipe, and why; rows
    joined by 'and' only where it has them all."""
    without: tuple[tuple[str, str], ...] = ()
    """The same of what a file that the command names has in it."""
    reads: Unasked = field(default_factory=Unasked)
    environment: tuple[tuple[str, str], ...] = ()
    """The same of variables that are set, here or in the command."""

    @property
    def shape(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Of a call."""
        return self.programs, self.words

    @classmethod
    def parse(cls, value: object, where: str) -> Recognised:
        read = Reader(value, where, _SIGNS)
        if not read.has("programs"):
            raise SpecError(f"{where}: programs: missing; write the program's name, or a pattern")
        return cls(
            read.texts("programs"),
            read.texts("words"),
            read.patterns("mentions"),
            read.reasons("needs", regex=True),
            read.reasons("refuses"),
            read.reasons("without", regex=True),
            _part(read, "reads", Unasked),
            read.reasons("environment"),
        )


@dataclass(frozen=True)
class Recipe:
    """Checked. `source` is what it was made from."""

    name: str
    title: str
    tried: str
    note: str
    recognised: Recognised
    values: Mapping[str, Value]
    restart: RestartFiles
    also: tuple[Also, ...]
    first: Edit
    resume: Edit
    save: Request
    complete: tuple[Test, ...]
    """Any of them."""
    progress: Number | None
    sane: Sane | None
    source: Mapping[str, Any]
    origin: str

    @property
    def was_tried(self) -> bool:
        return self.tried != NOT_RUN

    def to_json(self) -> dict[str, Any]:
        return dict(self.source)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Recipe:
        return cls.parse(record, f"recipe {record.get('name')}")

    @classmethod
    def parse(cls, source: object, origin: str) -> Recipe:
        """Raises SpecError: where, which key, what to write."""
        read = Reader(source, origin, _KEYS)
        for key in ("name", "restart", "complete"):
            if not read.has(key) or read.raw(key) == []:
                raise SpecError(f"{origin}: {key}: missing{_WHY[key]}")
        name = read.text("name") or ""
        if _NAME.fullmatch(name) is None or name in _TAKEN:
            raise SpecError(
                f"{origin}: name: {name!r} cannot be one: small letters, digits, - . _, "
                f"and none of {', '.join(_TAKEN)}"
            )
        values = read.raw("values") or {}
        if not isinstance(values, Mapping):
            raise SpecError(f"{read.at('values')}: must be a mapping of names")
        recipe = cls(
            name=name,
            title=read.text("title") or name,
            tried=read.text("tried") or NOT_RUN,
            note=read.text("note") or "",
            recognised=_part(read, "recognise", Recognised),
            values={
                key: Value.parse(v, f"{read.at('values')}: {key}") for key, v in values.items()
            },
            restart=RestartFiles.parse(read.raw("restart"), read.at("restart")),
            also=tuple(Also.parse(item, read.at("also")) for item in _items(read.raw("also"))),
            first=_part(read, "first", Edit),
            resume=_part(read, "resume", Edit),
            save=_part(read, "save", Request),
            complete=tuple(
                Test.parse(t, read.at("complete")) for t in _items(read.raw("complete"))
            ),
            progress=Number.parse(read.raw("progress"), read.at("progress"))
            if read.has("progress")
            else None,
            sane=Sane.parse(read.raw("sane"), read.at("sane")) if read.has("sane") else None,
            source=dict(source) if isinstance(source, Mapping) else {},
            origin=origin,
        )
        _check_fields(recipe)
        return recipe

    def call(self, work: Work) -> Invocation | None:
        """Where the command calls the program."""
        return find(work.argv, *self.recognised.shape, work.environ)

    def why_not_one(self, call: Invocation, work: Work) -> str | None:
        """Why the files of one call here do not tell of the whole command."""
        seen = self.recognised
        if not seen.programs:
            return None
        name = " ".join((Path(call.program).name, *seen.words))
        if is_repeated(work.argv, *seen.shape, work.environ):
            rest = "write one command each, with 'then:' for those that follow"
            return f"several calls of {name}: {rest}"
        gone = goes_to(work.argv, *seen.shape, work.environ, work.cwd)
        if gone is None:
            return None
        return (
            f"'{gone}' comes before {name}, whose restart files are looked for where the command "
            "begins: submit from that directory, without it"
        )

    def why_refused(
        self, call: Invocation, work: Work, outputs: Collection[Path | None] = ()
    ) -> str | None:
        """What of the command this recipe cannot work with. `outputs`: files of earlier links that
        it names too; a log of half a script says nothing of the script."""
        for words, why in self.recognised.refuses:
            if all(call.has(row.split()) for row in words.split(" and ")):
                return f"{words}: {why or f'not with recipe {self.name}'}"
        for name, why in self.recognised.environment:
            if work.environ.get(name) or re.search(rf"\b{name}=(?!\s|$)", " ".join(work.argv)):
                return f"{name}: {why or f'not with recipe {self.name}'}"
        named = ((path, text) for path, text in named_files(call, work.cwd) if path not in outputs)
        return self._why_not_with(self.recognised.without, named) or self._why_unasked(call, work)

    def _why_unasked(self, call: Invocation, work: Work) -> str | None:
        reads = self.recognised.reads
        if any(call.has(row.split()) for row in reads.unless):
            return None
        paths = (path for pattern in reads.files for path in sorted(work.cwd.glob(pattern)))
        return self._why_not_with(reads.without, beginnings(paths))

    def _why_not_with(
        self, without: Iterable[tuple[str, str]], files: Iterable[tuple[Path, str]]
    ) -> str | None:
        """Pattern by pattern: the first that is met tells why."""
        texts = list(files)
        for pattern, why in without:
            for path, text in texts:
                match = re.search(pattern, text, re.MULTILINE)
                if match is not None:
                    said = why or f"not with recipe {self.name}"
                    line = match["line" if "line" in match.re.groupindex else 0].strip()
                    return f"{path.name}: '{line}': {said}"
        return None

    def why_not_again(self, call: Invocation, work: Work) -> str | None:
        """Why the program would not take its restart file."""
        needs = self.recognised.needs
        if not needs or mentions(call, tuple(pattern for pattern, _ in needs), work.cwd):
            return None
        wanted = " and ".join(why or f"what matches {pattern}" for pattern, why in needs)
        return f"no file of the command has {wanted}: every link would begin anew. {self.note}"

    def knows(self, work: Work) -> bool:
        """Whether the command is of this kind, by what it shows."""
        seen = self.recognised
        if not seen.programs:
            return False
        by_name = not (seen.words or seen.mentions or seen.needs)
        if by_name and not is_run(work.argv, *seen.shape, work.environ):
            return False
        call, wanted = self.call(work), seen.mentions
        return call is not None and (not wanted or mentions(call, wanted, work.cwd))


_WHY = {
    "name": "",
    "restart": "; write the pattern of the restart files",
    "complete": "; write how to tell that the work is done, as {file: result.dat}; "
    "{exit_code: 0} if the program's own word is enough",
}


def _part(read: Reader, key: str, kind: Any) -> Any:
    return kind.parse(read.raw(key), read.at(key)) if read.has(key) else kind()


def _items(value: object) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _check_fields(recipe: Recipe) -> None:
    """A {name} that nobody defines is a mistake, not an empty place in a command."""
    known = BUILT_IN | set(recipe.values)
    for path, text in _texts(recipe.source, ()):
        if path[0] in ("title", "tried", "note") or path[-1] in _REGEXES:
            continue
        for name in _FIELD.findall(text):
            if name not in known:
                raise SpecError(
                    f"{recipe.origin}: {'.'.join(path)}: {{{name}}} is not known; define it under "
                    f"'values', or use one of {', '.join(sorted(known))}"
                )


_SIGNS = ("programs", "words", "mentions", "needs", "refuses", "without", "reads", "environment")
_REGEXES = ("regex", "word", "text", "no_text", "bytes", "mentions", "needs", "without",
            "begins", "ends")  # fmt: skip


def _texts(value: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item, path)
    elif isinstance(value, str):
        yield path, value


# ── where they are ────────────────────────────────────────────────────────────────────────
def load_recipes(cwd: Path | None = None, environ: Mapping[str, str] | None = None) -> list[Recipe]:
    """Those shipped, those of the user and those of the project; the later outrank."""
    made: dict[str, Recipe] = {}
    place = cwd or Path.cwd()
    for folder in _folders(place, os.environ if environ is None else environ):
        below = {name: recipe.source for name, recipe in made.items()}
        shared = folder == place / PROJECT
        sources = list(_sources(folder, shared=shared))
        for source, origin in sources:
            beside = {str(other["name"]): other for other, _ in sources if other is not source}
            try:
                whole = _whole(source, {**beside, **below}, origin)
                made[str(whole["name"])] = Recipe.parse(whole, origin)
            except SpecError:
                if not shared or _is_recipe(source):
                    raise
    return sorted(made.values(), key=lambda recipe: recipe.name)


def _sources(folder: Path, *, shared: bool) -> Iterator[tuple[dict[str, Any], str]]:
    """Others' files may lie in a project's folder."""
    for path in _files(folder):
        try:
            source = read_source(path)
        except SpecError:
            if shared:
                continue
            raise
        if _is_recipe(source) or "restart" in source:
            yield source, str(path)


def _is_recipe(source: Mapping[str, Any]) -> bool:
    """Whether it is clearly meant as one, and a mistake in it is to be said."""
    return isinstance(source.get("recognise"), Mapping) or isinstance(source.get("like"), str)


def _files(folder: Path) -> list[Path]:
    return sorted((*folder.glob("*.yaml"), *folder.glob("*.yml")))


def recipe_of(wanted: str | Mapping[str, Any], recipes: Iterable[Recipe], cwd: Path) -> Recipe:
    """What a spec means by `recipe:`: a name, the path of a file, or the recipe itself."""
    known = {recipe.name: recipe for recipe in recipes}
    sources = {name: recipe.source for name, recipe in known.items()}
    if not isinstance(wanted, str):
        source, origin = {"name": "inline", **wanted}, "recipe"
        return Recipe.parse(_whole(source, sources, origin), origin)
    if "/" in wanted or wanted.endswith((".yaml", ".yml")):
        return Recipe.parse(_whole(read_source(cwd / wanted), sources, wanted), wanted)
    if wanted not in known:
        for path in (cwd / PROJECT / f"{wanted}.yaml", cwd / PROJECT / f"{wanted}.yml"):
            if path.is_file():  # passed over, and now it is named: what is wrong with it?
                return Recipe.parse(_whole(read_source(path), sources, str(path)), str(path))
        raise SpecError(f"recipe: no recipe {wanted!r}; known: {', '.join(sorted(known))}")
    return known[wanted]


def read_source(path: Path) -> dict[str, Any]:
    """A recipe's file as plain text; the name of the file is its name if it says none."""
    import yaml

    try:
        source = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(source, dict):
        raise SpecError(f"{path}: must be a mapping of 'key: value'")
    return {"name": path.stem.lower(), **source}


def _folders(cwd: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    yield resources.folder("templates") / "recipes"
    above = environ.get("XDG_CONFIG_HOME")
    home = environ.get("HOME")
    if above or home:
        yield (Path(above) if above else Path(str(home)) / ".config") / "hpc_ckpt" / "recipes"
    yield cwd / PROJECT


def _whole(
    source: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]], origin: str
) -> dict[str, Any]:
    """With what the recipe it is like has, where it says nothing itself."""
    parent = source.get("like")
    if parent is None:
        return dict(source)
    if not isinstance(parent, str):
        raise SpecError(f"{origin}: like: must be the name of a recipe, not {parent!r}")
    if parent not in known:
        raise SpecError(f"{origin}: like: no recipe {parent!r}; known: {', '.join(sorted(known))}")
    below = _whole(known[parent], {k: v for k, v in known.items() if k != parent}, origin)
    inherited = {key: item for key, item in below.items() if key not in ("tried", "note")}
    own = {key: item for key, item in source.items() if key != "like"}
    return merge(inherited, own)


def matching(recipes: Iterable[Recipe], work: Work) -> Recipe | None:
    """The recipe that knows this command; a person's own before one that asks for more.

    One that was shipped and never run has to be named.
    """
    found = [r for r in recipes if (r.was_tried or _is_own(r)) and r.knows(work)]
    return max(found, key=_demands, default=None)


def untried(recipes: Iterable[Recipe], work: Work) -> Recipe | None:
    """The one that would know this command, had it been run."""
    found = [r for r in recipes if not r.was_tried and not _is_own(r) and r.knows(work)]
    return max(found, key=_demands, default=None)


def _is_own(recipe: Recipe) -> bool:
    return not Path(recipe.origin).is_relative_to(resources.folder("templates"))


def _demands(recipe: Recipe) -> tuple[bool, int, int]:
    seen = recipe.recognised
    return _is_own(recipe), len(seen.mentions) + len(seen.words), sum(map(len, seen.programs))
