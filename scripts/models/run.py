"""Take many architectures the way a user does, and write down how far each one gets.

    python scripts/models/run.py [--results FILE] [--keep FOLDER] [NAME ...]
    python scripts/models/run.py --page > docs/models.md

Each of architectures.py (or those named) gets a directory with a ``config.json`` and
random weights, and goes through ``compilekit init``, ``explain``, ``build`` with
verify, and a fresh process that loads the weights with ``from_pretrained``, attaches
the artifact, makes a call that is smaller than the bucket where padding is allowed, and
compares it with eager. Where a build prints lines that the configuration lacks, they
are added and it is built again, as the message says to.

A result is appended to the file as soon as it's there, and a name that the file has is
skipped, so a run goes on where another stopped. ``--page`` prints the page.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "docs" / "models.json"
sys.path[:0] = [str(ROOT), str(HERE)]

from architectures import CASES, Case  # noqa: E402

# Sizes of the one bucket that is built, by axis or key of [generate].
SIZES = {"b": 2, "s": 16, "t": 8, "batch": 2, "prompt": 8, "cache": 24}
NEW_TOKENS = 6


def main() -> int:
    """Run what isn't there yet; 1 if something neither works nor is refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--keep", type=Path, help="keep each one's files below this")
    parser.add_argument("--page", action="store_true", help="print the page")
    parser.add_argument("--step", choices=("make", "serve"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        step = {"make": make, "serve": serve}[options.step]
        print(json.dumps(step(options.names[0], options.folder)))
        return 0
    results: dict[str, Any] = {}
    if options.results.exists():
        results = json.loads(options.results.read_text())
    if options.page:
        print(page(results))
        return 0
    unknown = set(options.names) - CASES.keys()
    if unknown:
        parser.error(f"no such name: {', '.join(sorted(unknown))}")
    for name in options.names or CASES:
        if name in results:
            continue
        with contextlib.ExitStack() as stack:
            folder = options.keep and options.keep / re.sub(r"\W+", "_", name)
            if not folder:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            folder.mkdir(parents=True, exist_ok=True)
            results[name] = take(name, CASES[name], folder.resolve())
        print(f"{name}: {results[name]['result']}", flush=True)
        options.results.write_text(json.dumps(results, indent=1) + "\n")
    wanted = options.names or CASES
    return int(any(results[name]["result"] == "fails" for name in wanted))


# --- One architecture -----------------------------------------------------------------


def take(name: str, case: Case, folder: Path) -> dict[str, Any]:
    """Everything from ``init`` to a call that equals eager, as far as it goes."""
    remarks: list[str] = []
    record: dict[str, Any] = {"versions": versions(), "remarks": remarks}

    def ended(result: str, step: str, message: str) -> dict[str, Any]:
        return {**record, "result": result, "step": step, "message": message}

    made = child("make", name, folder)
    if made.returncode:
        return ended("fails", "make", made.stderr[-2000:])
    config = folder / "compilekit.toml"
    source = name if ":" in name else f"hf:{folder}"
    code, document = compilekit("init", source, "-o", str(config), "--force")
    if code == 2 and case.tables:
        remarks.append("init can't know its inputs")
    elif code:
        return ended(judged(code), "init", message_of(document))
    text = config.read_text() if not code else ""
    config.write_text(configured(text, source, case))
    code, document = compilekit("explain", str(config))
    if code:
        return ended(judged(code), "explain", message_of(document))
    for _ in range(3):
        code, document = compilekit(
            "build", str(config), "-o", str(folder / "artifact")
        )
        lacking = re.search(r"Add:\n(.*\Z)", message_of(document), re.DOTALL)
        if not code or lacking is None:
            break
        remarks.append("cut rules added as build says")
        config.write_text(added(config.read_text(), lacking[1]))
    if code:
        return ended(judged(code), "build", message_of(document))
    record["seconds"] = round(document["result"]["seconds"], 1)
    record["kernels"] = document["result"]["kernels"]
    served = child("serve", name, folder)
    if served.returncode:
        return ended("fails", "serve", served.stderr[-2000:])
    found = json.loads(served.stdout.splitlines()[-1])
    if found["message"]:
        return ended("fails", "serve", found["message"])
    return {**ended("works", "serve", ""), **found}


def judged(code: int) -> str:
    """A documented exit code is a refusal; a reader judges its message."""
    return "fails" if code == 1 or code < 0 else "refused"


def versions() -> dict[str, str]:
    from importlib.metadata import version

    names = ("torch", "transformers")
    return {"python": sys.version.split()[0], **{name: version(name) for name in names}}


def compilekit(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Run a command; its exit code and what it says with ``--json``."""
    command, *rest = arguments
    done = run("-m", "compilekit", command, "--json", *rest)
    try:
        return done.returncode, json.loads(done.stdout)
    except ValueError:
        text = f"{done.stdout[-500:]}{done.stderr[-1500:]}"
        return done.returncode or 1, {"error": {"message": text}}


def child(step: str, name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`make` or `serve` in a process of its own."""
    return run(__file__, "--step", step, "--folder", str(folder), name)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{HERE}"},
        timeout=900,
    )


def message_of(document: dict[str, Any]) -> str:
    """Why a command failed; "" if it didn't."""
    if "error" in document:
        return str(document["error"]["message"])
    buckets = document.get("result", {}).get("buckets", [])
    messages = [bucket.get("error") or "" for bucket in buckets]
    for bucket in buckets:
        stopped = bucket.get("stopped") or {}
        messages += [stopped.get("error", ""), stopped.get("hint", "")]
        messages += [
            f"{one['file']}:{one['line']} {one['source']}: {one['reason']}; {one['fix']}"
            for one in bucket.get("breaks", ())
        ]
    return "\n".join(dict.fromkeys(filter(None, messages)))


def configured(text: str, source: str, case: Case) -> str:
    """What a user makes of the file that ``init`` wrote: sizes, and `Case.edits`."""
    if case.tables:
        model = f'[model]\nsource = "{source}"\ndtype = "{case.dtype}"\n'
        return f'{model}\n{case.tables}\n[build]\ntargets = ["native"]\n'
    if "\n[generate]\n" in text and not case.generate:
        before, _, rest = text.partition("[generate]\n")
        forward, _, after = rest[rest.index("# # One bucket") :].partition(
            "\n[compile]"
        )
        forward = "\n".join(re.sub("^# ?", "", line) for line in forward.splitlines())
        text = f"{before}{forward}\n\n[compile]{after}"
    for old, new in case.edits.items():
        text = text.replace(old, new)
    return re.sub(
        r"^(\w+) = \[[\d, ]+\]",
        lambda m: f"{m[1]} = [{SIZES[m[1]]}]" if m[1] in SIZES else m[0],
        text,
        flags=re.MULTILINE,
    )


def added(text: str, lines: str) -> str:
    """The configuration with tables added, or put in the place of ones it has."""
    for table, rule in re.findall(r"^(\[.*\])\n(cut = .*)$", lines, re.MULTILINE):
        place = re.compile(rf"^{re.escape(table)}\ncut = .*$", re.MULTILINE)
        if place.search(text):
            text = place.sub(f"{table}\n{rule}".replace("\\", r"\\"), text)
        else:
            text = text.replace("\n[build]", f"\n{table}\n{rule}\n\n[build]")
    return text


# --- In processes of their own --------------------------------------------------------


def make(name: str, folder: Path) -> dict[str, Any]:
    """Write ``config.json`` and random weights of a class of transformers."""
    if ":" in name:
        return {}
    import torch
    import transformers

    case = CASES[name]
    model_class = getattr(transformers, name.split()[0])
    config = model_class.config_class(**case.config)
    torch.manual_seed(0)
    model = model_class._from_config(config, dtype=getattr(torch, case.dtype))
    model.save_pretrained(folder)
    return {}


def serve(name: str, folder: Path) -> dict[str, Any]:
    """Attach the artifact to a loaded model and compare a call with eager."""
    import torch

    from compilekit import attach
    from compilekit import config as configuration
    from compilekit.compiler.compare import compare

    model = loaded(name, folder).eval()
    twin = copy.deepcopy(model)
    config = configuration.load(folder / "compilekit.toml")
    receipt = attach(model, folder / "artifact", require="program")
    calls = call_generate if CASES[name].generate else call_forward
    with torch.inference_mode():
        torch.manual_seed(0)
        expected = calls(twin, config)
        torch.manual_seed(0)
        found = calls(model, config)
    difference = compare(found, expected)
    receipt.finish()
    error = difference.max_abs_error
    return {
        "max_abs_error": None if difference.message else error,
        "message": difference.message,
        "compiles": receipt.compiles,
    }


def loaded(name: str, folder: Path) -> Any:
    if ":" in name:
        import torch

        module, _, factory = name.partition(":")
        torch.manual_seed(0)
        return getattr(importlib.import_module(module), factory)()
    import transformers

    model_class = getattr(transformers, name.split()[0])
    return model_class.from_pretrained(folder, dtype=CASES[name].dtype)


def call_forward(model: Any, config: Any) -> Any:
    """A call one smaller along padded axes, its first row two tokens shorter by mask."""
    from compilekit import plan
    from compilekit.buckets import bucket_table
    from compilekit.compiler.examples import example_kwargs

    (entry,) = config.entries.values()
    (bucket,) = plan.buckets(config, entry.name)
    exact = bucket_table([bucket], entry.inputs).exact
    axes = {a: n if a in exact else max(1, n - 1) for a, n in bucket.axes.items()}
    kwargs = example_kwargs(config, entry, plan.bucket(axes), seed=1)
    if "attention_mask" in entry.inputs:
        kwargs["attention_mask"][:] = 1
        kwargs["attention_mask"][0, -2:] = 0
    for path, rule in entry.inputs.items():
        if rule.dtype == "bool":
            kwargs[path][:] = False
            kwargs[path][0, -2:] = True
    return getattr(model, entry.method)(**kwargs)


def call_generate(model: Any, config: Any) -> Any:
    """A few tokens for two prompts, the shorter one padded on the left."""
    import torch

    ids = torch.randint(3, 128, (SIZES["batch"], SIZES["prompt"] - 1))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        cache_implementation="static",
        output_scores=True,
        return_dict_in_generate=True,
    )["scores"]


# --- The page -------------------------------------------------------------------------


_PAGE = """\
# Models: what was built

Tiny random configurations of each architecture, taken the way a user takes theirs:
`compilekit init`, `explain`, `build` with verify, then a fresh process that loads the
weights with `from_pretrained`, attaches the artifact under `require = "program"`, makes
a call that is smaller than the bucket where padding is allowed (the last two tokens of
a row masked), and compares all outputs with eager's. Made for the machine's own CPU
target, with {versions}, by

    python scripts/models/run.py          # goes on where it stopped
    python scripts/models/run.py --page > docs/models.md

What is particular to each configuration is in
[architectures.py](../scripts/models/architectures.py), the plain modules in
[own.py](../scripts/models/own.py); each result with its versions in
[models.json](models.json). `generate` means the steps behind `model.generate`
([generate.md](generate.md)), compared by the scores of {tokens} new tokens for two
prompts, one padded on the left; everything else is one `forward`. Sizes say nothing
about speed: these models fit in a cache.

{works} of the {count} that were run work. The twelve of
[tests/test_architectures.py](../tests/test_architectures.py) (BERT, GPT-2, Llama,
Qwen2, T5, ViT, ResNet, Whisper and four plain modules) aren't repeated here.

| architecture | class | result | largest difference | remark |
| --- | --- | --- | --- | --- |
{rows}

In the list and not run yet: {missing}.
"""


def page(results: dict[str, Any]) -> str:
    """The results as a page of the documentation."""
    used = {tuple(result["versions"].items()) for result in results.values()}
    made = "; ".join(
        ", ".join(f"{name} {version}" for name, version in one) for one in sorted(used)
    )
    return _PAGE.format(
        versions=made,
        tokens=NEW_TOKENS,
        works=sum(result["result"] == "works" for result in results.values()),
        count=len(results),
        missing=", ".join(f"`{name}`" for name in CASES if name not in results) or "-",
        rows="\n".join(row(name, results[name]) for name in CASES if name in results),
    ).rstrip()


def row(name: str, result: dict[str, Any]) -> str:
    """One line of the table."""
    case = CASES[name]
    model, *variant = name.split()
    own = " (own.py)" if ":" in model else ""
    shown = f"`{model.removeprefix('own:')}`{own}"
    error = result.get("max_abs_error")
    remarks = [*dict.fromkeys(result["remarks"])]
    if message := result["message"]:
        remarks.append(f"{result['step']}: {message.splitlines()[0]}")
    cells = (
        ", ".join((case.kind, *variant)),
        shown,
        result["result"],
        "-" if error is None else f"{error:.1e}",
        "; ".join(remarks).replace("|", "\\|"),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
