"""docs/configuration.md has every key of the configuration, with its true default."""

from __future__ import annotations

import dataclasses
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import compilekit
from compilekit import config as configuration
from compilekit.config import records, rules
from compilekit.errors import ConfigError

ROOT = Path(__file__).parents[1]
# Where it is installed: the wheel is tested without the source tree.
PACKAGE = Path(compilekit.__file__).parent
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")

RECORDS: Mapping[str, type] = {
    "model": records.ModelConfig,
    "entries.*": records.EntryConfig,
    "entries.*.inputs.*": records.InputConfig,
    "entries.*.outputs.*": records.OutputConfig,
    "compile": records.CompileConfig,
    "gates": records.GatesConfig,
    "verify": records.VerifyConfig,
    "build": records.BuildConfig,
    "autotune": records.AutotuneConfig,
    "freeze": records.FreezeConfig,
    "serve": records.ServeConfig,
}
FIELDS = {"class": "model_class", "from": "source"}
CHOICES = {
    "model.dtype": rules.MODEL_DTYPES,
    "entries.*.grad": rules.GRAD_MODES,
    "compile.mode": rules.MODES,
    "compile.attention": rules.ATTENTION,
    "gates.math_attention": rules.MATH_ATTENTION,
    "build.routes": rules.ROUTES,
    "serve.on_uncovered": rules.ON_UNCOVERED,
    "serve.over_length": rules.OVER_LENGTH,
}
# Every table that can lack something, without it.
EMPTY = """\
[model]
[axes]
n = [1]
[entries.NAME]
[entries.OTHER.inputs.PATH]
[entries.OTHER.outputs.PATH]
[generate]
[freeze]
[autotune]
"""


class Row(NamedTuple):
    """A line of the page: one key, with what stands in its columns."""

    table: str
    key: str
    type: str
    default: str


def rows() -> Iterator[Row]:
    """Every key that the page describes."""
    table = ""
    for line in PAGE.splitlines():
        if line.startswith("## "):
            heading = re.fullmatch(r"## `\[(.+)\]`", line)
            table = re.sub(r"\b[A-Z]+\b", "*", heading[1]) if heading else ""
        elif table and (row := re.match(r"\| `(\w+)` \| (.+?) \| (.+?) \|", line)):
            yield Row(table, *row.groups())


ROWS = tuple(rows())


def name(row: Row) -> str:
    return f"{row.table}.{row.key}"


def test_every_table_is_on_the_page() -> None:
    """And none that isn't one."""
    assert {row.table.partition(".")[0] for row in ROWS} == set(rules.KEYS[""])


def test_every_key_is_on_the_page() -> None:
    """Once, and none that isn't one; an axis is named by the user."""
    keys = {table: sorted(keys) for table, keys in rules.KEYS.items() if table}
    found: dict[str, list[str]] = {}
    for row in ROWS:
        found.setdefault(row.table, []).append(row.key)
    assert found.pop("axes") == ["NAME"]
    assert {table: sorted(keys) for table, keys in found.items()} == keys


@pytest.mark.parametrize("row", [row for row in ROWS if row.table in RECORDS], ids=name)
def test_default(row: Row) -> None:
    """What the page calls the default is what the dataclass has."""
    fields = {field.name: field for field in dataclasses.fields(RECORDS[row.table])}
    field = fields[FIELDS.get(row.key, row.key)]
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    if row.default == "required":
        assert not default or default is dataclasses.MISSING
    elif row.default == "the entry's name":
        assert (row.key, default) == ("method", dataclasses.MISSING)
    elif row.default == "–":
        assert default is None
    else:
        (written,) = re.findall(r"^`(.+)`$", row.default)
        value = tomllib.loads(f"x = {written}")["x"]
        value = tuple(value) if isinstance(value, list) else value
        assert (value, type(value)) == (default, type(default))


def test_required(tmp_path: Path) -> None:
    """The keys that the page calls required are those that the loader misses."""
    file = tmp_path / "compilekit.toml"
    file.write_text(EMPTY, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        configuration.load(file)
    missing = {
        re.sub(r"\b[A-Z]+\b", "*", problem["key"])
        for problem in caught.value.fields["problems"]
        if problem["message"].startswith("missing")
    }
    assert missing == {name(row) for row in ROWS if row.default == "required"}


@pytest.mark.parametrize("key", CHOICES)
def test_choices(key: str) -> None:
    """The page names all values that a key may have."""
    (row,) = (row for row in ROWS if name(row) == key)
    assert tuple(re.findall(r'`"(.+?)"`', row.type)) == CHOICES[key]


def test_input_dtypes() -> None:
    """The page names all dtypes of inputs, in their order."""
    listed = re.search(r"^`dtype` is one of (.+?)\.\s", PAGE, re.DOTALL | re.MULTILINE)
    assert listed is not None
    assert tuple(re.findall(r"`(\w+)`", listed[1])) == rules.INPUT_DTYPES


def test_keys_in_sentences() -> None:
    """What any page calls ``[table] key`` is a key of that table."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    named = {
        found
        for page in pages
        for found in re.findall(
            r"`\[([a-z]+)\] ([a-z_]+)\b", page.read_text(encoding="utf-8")
        )
    }
    assert ("serve", "over_length") in named
    for table, key in named:
        assert key in rules.KEYS[table], (table, key)


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's configuration, with its module beside it."""
    for language, place in (("python", "shop.py"), ("toml", "compilekit.toml")):
        (text,) = re.findall(rf"```{language}\n(.+?)```", PAGE, re.DOTALL)
        (tmp_path / place).write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path / "compilekit.toml"
    sys.modules.pop("shop", None)


def test_names_of_outputs(example: Path) -> None:
    """Outputs of the page's model are called and cut as its configuration says."""
    from compilekit.compiler.convention import output_tensors
    from compilekit.compiler.examples import example_kwargs
    from compilekit.compiler.models import build_real
    from compilekit.plan import Bucket

    config = configuration.load(example)
    model = build_real(config)
    axes = {"b": 5, "s": 7}
    for entry in config.entries.values():
        kwargs = example_kwargs(config, entry, Bucket("", axes))
        outputs = output_tensors(getattr(model, entry.method)(**kwargs))
        cuts: dict[str, dict[int, Any]] = {
            path: {
                dimension: axis
                for dimension, size in enumerate(tensor.shape)
                for axis in axes
                if size == axes[axis]
            }
            for path, tensor in outputs.items()
        }
        assert cuts == {path: rule.cut for path, rule in entry.outputs.items()}


def test_messages_are_said() -> None:
    """Each message in the README's list is one that the code has."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.partition("| message | page |")[2].partition("\n\n")[0]
    messages = re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)
    code = [file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")]
    assert len(messages) > 8
    for message in messages:
        for part in message.split("…"):
            assert any(part.strip() in text for text in code), part


def test_links_lead_somewhere() -> None:
    """A link into the page, or out of it, names a file and a heading that are there."""
    anchors = {
        re.sub(r"[^\w\- ]", "", line.lstrip("# ")).lower().replace(" ", "-")
        for line in PAGE.splitlines()
        if line.startswith("#")
    }
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        for anchor in re.findall(r"configuration\.md#([^)]*)", text):
            assert anchor in anchors, (page.name, anchor)
    for target in re.findall(r"\]\(([^)#]+\.md)", PAGE):
        assert (ROOT / "docs" / target).is_file(), target
