"""The command line as people and scripts meet it: streams, documents, exit codes.

Long commands run against stand-ins for the library calls behind them; what those calls
really do is tested with them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from compilekit import config as configuration
from compilekit import errors
from compilekit.cli import run
from compilekit.cli.build import failures
from compilekit.events import BuildEvent, VerifyEvent
from compilekit.results import (
    BucketResult,
    BucketStatus,
    BucketVerified,
    BuildResult,
    VerifyResult,
)

GOLDEN = Path(__file__).parent / "data" / "golden" / "artifact"
DIGEST = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"

CONFIG = """\
[model]
source = "tests.modules.toy:make"
[axes]
b = [1, 8]
s = [32]
[entries.forward.inputs.input_ids]
shape = ["b", "s"]
dtype = "int64"
pad = 0
[build]
targets = ["cpu-x86_64-v3"]
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """No variable of the machine that runs the tests steers a command, and none that
    ``load`` sets for what it becomes stays."""
    with mock.patch.dict(os.environ):
        for name in [n for n in os.environ if n.startswith("COMPILEKIT_")]:
            del os.environ[name]
        yield


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process → exit code, stdout, stderr."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A folder in which this user can look at nothing."""
    folder = tmp_path / "closed"
    folder.mkdir(mode=0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield folder
    os.seteuid(user)
    folder.chmod(0o700)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A small configuration with two buckets."""
    path = tmp_path / "compilekit.toml"
    path.write_text(CONFIG)
    return path


def stand_in(
    monkeypatch: pytest.MonkeyPatch, module: str, **functions: Callable[..., Any]
) -> None:
    """Put a module with these functions in the place of a heavy one."""
    fake = types.ModuleType(module)
    vars(fake).update(functions)
    monkeypatch.setitem(sys.modules, module, fake)


# --- The boundary ---------------------------------------------------------------------


def test_usage_error_is_one_line_and_a_pointer(command: Run) -> None:
    """A misspelt command names the nearest one and exits 2."""
    code, out, err = command("biuld")
    assert (code, out) == (2, "")
    assert err == (
        "error: No such command 'biuld'. Did you mean 'build'?\n"
        "Help: compilekit --help\n"
    )


def test_misspelt_option_points_to_the_commands_help(command: Run) -> None:
    """A misspelt option names the nearest one and the help of its own command."""
    code, _, err = command("build", "c.toml", "--ouput", "x")
    assert code == 2
    assert "Did you mean '--output'?" in err
    assert err.endswith("Help: compilekit build --help\n")


@pytest.mark.parametrize("group", [[], ["target"], ["bench"]])
def test_group_alone_shows_its_help(group: list[str], command: Run) -> None:
    """A group without a command shows what there is, and exits 2."""
    code, out, err = command(*group)
    assert (code, out) == (2, "")
    assert err.startswith("Usage: compilekit")


def test_usage_error_as_json(command: Run) -> None:
    """``--json`` counts even where it comes after the mistake."""
    code, out, _ = command("target", "show", "native", "extra", "--json")
    document = json.loads(out)
    assert code == 2
    assert document["command"] == "target show"
    assert document["error"]["type"] == "UsageError"


def test_json_of_the_served_command_is_its_own(command: Run) -> None:
    """A ``--json`` behind ``--`` belongs to the command that is served."""
    code, out, err = command("load", "--bogus", GOLDEN, "--", "serve", "--json")
    assert (code, out) == (2, "")
    assert "--bogus" in err


@pytest.mark.parametrize("place", ["before", "after"])
def test_output_options_work_on_both_sides(place: str, command: Run) -> None:
    """``compilekit --json target list`` and ``compilekit target list --json`` agree."""
    words = ["target", "list"]
    words = ["--json", *words] if place == "before" else [*words, "--json"]
    code, out, _ = command(*words)
    document = json.loads(out)
    assert code == 0
    assert (document["schema"], document["command"]) == (1, "target list")
    assert document["result"]["targets"]


ERRORS = [
    errors.ConfigError("m", hint="h", line=3),
    errors.GraphBreakError("m"),
    errors.HarvestError("m"),
    errors.DigestError("m", path="a"),
    errors.MismatchError(
        "w", (errors.Mismatch("torch.version", "1", "2", "refuse", "c", "h"),)
    ),
    errors.AttachError("m"),
    errors.VerifyError("m"),
    errors.PolicyError("m"),
    errors.NoBucketError("m"),
    errors.SignatureError("m"),
    errors.NeedsDeviceError("m"),
    errors.ResourceError("m"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_each_error_has_its_exit_code(
    error: errors.CompilekitError,
    as_json: bool,
    command: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error of the tree: its exit code, its message, its fields; no traceback."""

    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr("compilekit.targets.load_target", fail)
    words = ["target", "show", "native", *(["--json"] if as_json else [])]
    code, out, err = command(*words)
    assert code == error.exit_code
    assert err.startswith(f"error: {error.message}\n")
    assert "Traceback" not in err
    if not as_json:
        assert out == ""
        return
    shown = json.loads(out)["error"]
    assert shown["type"] == type(error).__name__
    assert shown["message"] == str(error)
    assert shown["fields"] == json.loads(json.dumps(error.fields))


def test_defect_keeps_its_traceback(
    command: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An unexpected exception is a short message; its traceback lies in a file."""

    def fail(name: str) -> None:
        raise KeyError("python.version")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("compilekit.targets.load_target", fail)
    code, out, err = command("target", "show", "native")
    assert (code, out) == (1, "")
    assert "a defect of compilekit, not of your input: KeyError" in err
    assert "Traceback" not in err
    [kept] = tmp_path.iterdir()
    assert str(kept) in err
    assert "Traceback" in kept.read_text()


def test_defect_without_a_place_shows_its_traceback(
    command: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where no file can be written, the terminal is where the traceback is kept."""

    def fail(name: str) -> None:
        raise KeyError("python.version")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    monkeypatch.setattr("compilekit.targets.load_target", fail)
    code, _, err = command("target", "show", "native")
    assert code == 1
    assert "Traceback" in err


def test_interrupt_says_that_nothing_was_written(
    command: Run, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends with 130 and one line."""

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    stand_in(monkeypatch, "compilekit.compiler.build", build=interrupt)
    code, out, err = command("build", config, "-o", config.parent / "out", "-q")
    assert (code, out) == (130, "")
    assert err.strip() == "error: interrupted; nothing was written"


def test_interrupt_of_a_process(tmp_path: Path) -> None:
    """A real SIGINT to a real process ends with 130 and no traceback."""
    code = (
        "import os, signal, sys, compilekit.targets as t\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "t.load_target = lambda name: os.kill(os.getpid(), signal.SIGINT)\n"
        "from compilekit.cli import run\n"
        "sys.exit(run(['target', 'show', 'native']))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert process.returncode == 130, process.stderr
    assert "Traceback" not in process.stderr


def test_reader_that_leaves_early_is_no_error() -> None:
    """``compilekit ... | head`` ends without a traceback or a complaint at exit."""
    process = subprocess.Popen(
        [sys.executable, "-m", "compilekit", "inspect", str(GOLDEN), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    complaint = process.stderr.read().decode()
    process.stderr.close()
    process.wait()
    assert complaint == ""


def test_ascii_terminal_survives_other_letters(tmp_path: Path) -> None:
    """A name outside ASCII doesn't crash a process whose streams speak ASCII only."""
    process = subprocess.run(
        [sys.executable, "-m", "compilekit", "inspect", str(tmp_path / "modèle")],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert process.returncode == errors.ManifestError.exit_code
    assert b"mod\\xe8le" in process.stderr


# --- init and plan --------------------------------------------------------------------


def test_init_writes_and_never_overwrites(
    command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is written once; a second time needs ``--force``."""
    monkeypatch.setattr("compilekit.init.render", lambda model, _: f"# {model}\n")
    path = tmp_path / "deep" / "compilekit.toml"
    code, out, err = command("init", "model-a", "-o", path)
    assert code == 0
    assert out == f"config\t{path}\nmodel\tmodel-a\n"
    assert err == f"next: compilekit plan {path}\n"
    code, _, err = command("init", "model-b", "-o", path)
    assert code == 2
    assert "left as it is" in err
    assert path.read_text() == "# model-a\n"
    assert command("init", "model-b", "-o", path, "--force")[0] == 0
    assert path.read_text() == "# model-b\n"
    assert [p.name for p in path.parent.iterdir()] == ["compilekit.toml"]


def test_plan_lists_every_job(command: Run, config: Path) -> None:
    """One line per target, entry and bucket, with the shapes that will be compiled."""
    code, out, err = command("plan", config)
    assert code == 0
    assert out.splitlines() == [
        "# job\ttarget\tentry\tbucket\tinputs",
        "job\tcpu-x86_64-v3\tforward\tb1_s32\tinput_ids int64[1, 32]",
        "job\tcpu-x86_64-v3\tforward\tb8_s32\tinput_ids int64[8, 32]",
    ]
    assert err == f"next: compilekit build {config} -o artifact\n"


def test_plan_as_json(command: Run, config: Path) -> None:
    """The document has each job's axes and shapes as numbers."""
    _, out, _ = command("plan", config, "--json")
    jobs = json.loads(out)["result"]["jobs"]
    assert jobs[1]["axes"] == {"b": 8, "s": 32}
    assert jobs[1]["inputs"] == {"input_ids": {"dtype": "int64", "shape": [8, 32]}}


@pytest.mark.parametrize(
    "words",
    [
        *(["plan"], ["explain"], ["build"], ["tune"], ["bench", "startup"]),
        *(["check"], ["load"], ["inspect"], ["verify"], ["doctor"], ["pack"]),
        *(["init"], ["unpack"], ["diff", GOLDEN], ["prune", "--target", "x"]),
        *(["merge", GOLDEN], ["sign", "--key", "x"], ["pack", GOLDEN, "-o"]),
        *(["unpack", "x", "-o"], ["init", "os:getcwd", "-o"]),
        ["verify-signature", "--key", "x"],
    ],
    ids=lambda words: " ".join(map(str, words[:1] + words[2:])),
)
@pytest.mark.parametrize("name", ["below", "n" * 300], ids=["closed", "long"])
def test_a_path_that_cannot_be_looked_at(
    words: list[str | Path], name: str, command: Run, closed: Path
) -> None:
    """It's the machine's or the user's doing, and never a defect."""
    code, _, err = command(*words, closed / name)
    assert code in (2, 5, 13)
    assert "a defect" not in err


def test_the_current_directory_may_be_gone(
    command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Absolute paths are enough; what needs it says so."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert command("check", GOLDEN)[0] in (0, 4)
    code, _, err = command("check", "artifact")
    assert code == 13
    assert "the current directory is gone" in err


def test_missing_config_is_exit_2(command: Run, tmp_path: Path) -> None:
    """A configuration that isn't there is the user's mistake, said in one sentence."""
    code, _, err = command("plan", tmp_path / "no.toml")
    assert code == 2
    assert "no.toml" in err


# --- build ----------------------------------------------------------------------------


def build_result(status: BucketStatus = "verified") -> BuildResult:
    """Two buckets of this status; of failed ones, the first is built."""
    failed = status == "failed"
    first = BucketResult(
        target="cpu-x86_64-v3",
        entry="forward",
        bucket="b1_s32",
        status="built" if failed else status,
        kernels=12,
        seconds=3.0,
        size_bytes=4096,
    )
    second = dataclasses.replace(
        first,
        bucket="b8_s32",
        status=status,
        error="lowering failed\nDo this." if failed else "",
        error_type="HarvestError" if failed else "",
        log="out.logs/b8_s32.log" if failed else "",
    )
    return BuildResult(
        artifact=None if failed else Path("out"),
        digest="" if failed else DIGEST,
        buckets=(first, second),
        seconds=6.5,
        size_bytes=8192,
        kernels=12,
        exit_code=4 if failed else 0,
    )


def fake_build(result: BuildResult, seen: dict[str, Any]) -> Callable[..., BuildResult]:
    """A build that reports two buckets and remembers how it was called."""

    def build(config: Any, out: Path, **options: Any) -> BuildResult:
        seen.update(options, config=config, out=out)
        on_event = options["on_event"]
        for index, bucket in enumerate(result.buckets, 1):
            event = BuildEvent(
                "started",
                bucket.target,
                bucket.entry,
                bucket.bucket,
                index=index,
                count=2,
            )
            on_event(event)
            step = dataclasses.replace(event, stage="lower", seconds=3.21)
            on_event(step)
            on_event(dataclasses.replace(step, kind="log", message="a detail"))
            if bucket.status == "failed":
                text = "lowering failed\nDo this."
                on_event(dataclasses.replace(event, kind="failed", message=text))
                continue
            on_event(dataclasses.replace(step, kind="stage", kernels=12))
            on_event(
                dataclasses.replace(event, kind="finished", seconds=4.0, kernels=12)
            )
        return result

    return build


def test_build_narrates_and_sums_up(
    command: Run, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages go to stderr as plain lines; the summary and the digest to stdout."""
    seen: dict[str, Any] = {}
    stand_in(
        monkeypatch,
        "compilekit.compiler.build",
        build=fake_build(build_result(), seen),
    )
    code, out, err = command("build", config, "-o", "out")
    assert code == 0
    assert err.splitlines() == [
        "building tests.modules.toy:make for cpu-x86_64-v3",
        "bucket 1/2 b1_s32 lowered 3.2s 12 kernels",
        "bucket 1/2 b1_s32 done 4.0s 12 kernels",
        "bucket 2/2 b8_s32 lowered 3.2s 12 kernels",
        "bucket 2/2 b8_s32 done 4.0s 12 kernels",
        "next: compilekit load out -- python serve.py",
    ]
    assert "bucket\tcpu-x86_64-v3\tforward\tb8_s32\t12\t3.000000\t4096\tverified" in out
    assert f"digest\t{DIGEST}" in out
    assert seen["out"] == Path("out")
    assert (seen["targets"], seen["jobs"], seen["verify"]) == (None, 0, True)
    assert seen["allow_untested_torch"] is False


def test_build_passes_its_options_on(
    command: Run, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each option reaches the library call."""
    seen: dict[str, Any] = {}
    stand_in(
        monkeypatch,
        "compilekit.compiler.build",
        build=fake_build(build_result("built"), seen),
    )
    _, _, err = command(
        *("build", config, "-o", "out", "-j", "2", "--no-verify"),
        *("--target", "cpu-x86_64-v4", "--target", "native"),
        "--allow-untested-torch",
    )
    assert seen["targets"] == ("cpu-x86_64-v4", "native")
    assert (seen["jobs"], seen["verify"]) == (2, False)
    assert seen["allow_untested_torch"] is True
    assert err.endswith("next: compilekit verify out\n")


def test_failed_bucket_is_named_with_its_log(
    command: Run, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed bucket: named at once and in the summary, exit code of its error."""
    result = build_result("failed")
    stand_in(monkeypatch, "compilekit.compiler.build", build=fake_build(result, {}))
    code, out, err = command("build", config, "-o", "out")
    assert code == errors.HarvestError.exit_code
    assert "bucket 2/2 b8_s32 failed 0.0s lowering failed\n" in err
    assert "next:" not in err
    assert out.endswith(
        "cpu-x86_64-v3/forward/b8_s32 failed\n"
        "  lowering failed\n"
        "  Do this.\n"
        "  log: out.logs/b8_s32.log\n"
        "no artifact: 1 bucket failed\n"
    )


def test_same_failure_is_said_once() -> None:
    """Buckets that fail for one reason share its paragraph; each log is named."""
    first = build_result("failed").buckets[1]
    second = dataclasses.replace(first, bucket="b9_s32", log="out.logs/b9_s32.log")
    other = dataclasses.replace(first, bucket="b4_s32", error="else", log="")
    assert failures((first, other, second)) == [
        "cpu-x86_64-v3/forward/b8_s32, cpu-x86_64-v3/forward/b9_s32 failed\n"
        "  lowering failed\n"
        "  Do this.\n"
        "  log: out.logs/b8_s32.log\n"
        "  log: out.logs/b9_s32.log",
        "cpu-x86_64-v3/forward/b4_s32 failed\n  else",
    ]


def test_failed_build_is_a_result(
    command: Run, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``--json`` a failed build is one document that tells every bucket."""
    result = build_result("failed")
    stand_in(monkeypatch, "compilekit.compiler.build", build=fake_build(result, {}))
    code, out, _ = command("build", config, "-o", "out", "--json")
    document = json.loads(out)
    assert code == 4
    assert document["result"]["artifact"] is None
    assert [b["status"] for b in document["result"]["buckets"]] == ["built", "failed"]


@pytest.mark.parametrize(("option", "shown"), [("-v", True), ("-q", False)])
def test_verbosity(
    option: str,
    shown: bool,
    command: Run,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``-v`` shows what stages log, ``-q`` nothing but the summary."""
    build = fake_build(build_result(), {})
    stand_in(monkeypatch, "compilekit.compiler.build", build=build)
    _, out, err = command("build", config, "-o", "out", option)
    assert ("a detail" in err) is shown
    assert (err == "") is not shown
    assert DIGEST in out


def test_unknown_target_is_refused_before_anything_heavy(
    command: Run, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt target costs no import of the compiler."""
    monkeypatch.setitem(sys.modules, "compilekit.compiler.build", None)
    code, _, err = command("build", config, "-o", "out", "--target", "cpu-x86_64-v5")
    assert code == 2
    assert "cpu-x86_64-v5" in err


# --- verify ---------------------------------------------------------------------------


@pytest.mark.parametrize("passed", [True, False])
def test_verify_shows_each_replay(
    passed: bool, command: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One row per replay; exit 8 and the reason when one of them fails."""
    why = "" if passed else "last_hidden_state: NaN where eager has numbers"
    replay = BucketVerified(
        "forward",
        "b1_s32",
        4,
        3e-7 if passed else math.inf,
        1e-5,
        1e-5,
        0,
        0,
        passed,
        why,
        "cpu-x86_64-v3",
    )

    def verify(
        artifact: Path,
        *,
        config: configuration.Config | None,
        weights: str | None,
        threads: tuple[int, ...],
        on_event: Any,
    ) -> VerifyResult:
        assert (weights, threads) == (str(tmp_path / "weights"), (1, 4))
        assert config is not None
        assert config.path == path
        event = VerifyEvent("started", "cpu-x86_64-v3", "forward", "b1_s32", 4, 0, 1, 1)
        on_event(event)
        on_event(dataclasses.replace(event, kind="finished", result=replay))
        return VerifyResult((replay,), Path("a.verified.json"), DIGEST, 1.0)

    path = tmp_path / "compilekit.toml"
    path.write_text(CONFIG)
    stand_in(monkeypatch, "compilekit.compiler.verify", verify=verify)
    # A path of the command line counts from here, not from the configuration.
    (tmp_path / "weights").mkdir()
    monkeypatch.chdir(tmp_path)
    line: tuple[Any, ...] = ("verify", GOLDEN, "--config", path)
    line += ("--weights", "weights")
    line += ("--threads", "1", "--threads", "4")
    code, out, err = command(*line)
    assert code == (0 if passed else errors.VerifyError.exit_code)
    word = "passed" if passed else "failed"
    assert f"replay 1/1 b1_s32 4 threads {word}" in err
    assert f"verified\t{'yes' if passed else 'no'}" in out
    assert ("next:" in err) is passed
    assert why in out


def test_verify_of_no_artifact_is_exit_5(command: Run, tmp_path: Path) -> None:
    """What isn't an artifact is refused before anything heavy is imported."""
    assert command("verify", tmp_path / "nothing")[0] == 5


# --- inspect --------------------------------------------------------------------------


def test_inspect_shows_what_is_inside(command: Run) -> None:
    """Model, digest, one line per bucket with kernels and bytes."""
    code, out, _ = command("inspect", GOLDEN)
    lines = out.splitlines()
    buckets = [line.split("\t") for line in lines if line.startswith("bucket\t")]
    assert code == 0
    assert [bucket[3] for bucket in buckets] == ["b1_s32", "b1_s128"]
    assert all(int(bucket[4]) >= 1 and int(bucket[5]) > 0 for bucket in buckets)
    assert any(line.startswith("digest\t") for line in lines)


def test_inspect_as_json(command: Run) -> None:
    """The document's digest is the artifact's, its buckets have numbers."""
    from compilekit.artifact import open_artifact

    _, out, _ = command("inspect", GOLDEN, "--json")
    result = json.loads(out)["result"]
    opened = open_artifact(GOLDEN)
    assert result["digest"] == opened.digest
    assert result["size_bytes"] == opened.size_bytes
    assert len(result["buckets"]) == len(opened.programs)


def test_inspect_one_bucket(command: Run) -> None:
    """A bucket's kernels with the path of their source, and its tensors."""
    code, out, _ = command("inspect", GOLDEN, "--bucket", "b1_s32")
    assert code == 0
    kernels = [line for line in out.splitlines() if line.startswith("kernel\t")]
    assert kernels
    for line in kernels:
        assert (GOLDEN / line.split("\t")[-1]).is_file()
    assert "argument\tinput_ids\tint64[1, 32]" in out


def test_inspect_names_the_buckets_there_are(command: Run) -> None:
    """An unknown bucket is refused with the known ones."""
    code, _, err = command("inspect", GOLDEN, "--bucket", "b2_s2")
    assert code == 2
    assert "b1_s32, b1_s128" in err


# --- check and load -------------------------------------------------------------------

MISFIT = errors.Mismatch("torch.version", "2.13.0", "2.11.0", "refuse", "Why.", "Do.")
WARNING = MISFIT._replace(factor="transformers.version", verdict="warn")


@pytest.mark.parametrize(
    ("mismatches", "code"), [((), 0), ((WARNING,), 0), ((MISFIT, WARNING), 6)]
)
def test_check_shows_all_mismatches(
    mismatches: tuple[errors.Mismatch, ...],
    code: int,
    command: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every mismatch is a row; only one that forbids the start is an error."""
    stand_in(monkeypatch, "compilekit.runtime.check", check=lambda path: mismatches)
    found, out, _ = command("check", GOLDEN)
    rows = [line for line in out.splitlines() if line.startswith("mismatch\t")]
    assert found == code
    assert len(rows) == len(mismatches)
    assert f"fits\t{'no' if code else 'yes'}" in out


@pytest.fixture
def fitting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Decide what the machine check of ``load`` finds."""

    def decide(*mismatches: errors.Mismatch) -> None:
        check = "compilekit.runtime.check"
        monkeypatch.setattr(f"{check}.check", lambda artifact: mismatches)
        monkeypatch.setattr(f"{check}.choose_target", lambda artifact: "cpu-x86_64-v3")

    return decide


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Commands that ``load`` would have become."""
    commands: list[tuple[str, ...]] = []

    def execvp(file: str, command: tuple[str, ...]) -> None:
        commands.append(command)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execvp", execvp)
    # load writes to os.environ, as it's about to be another program.
    monkeypatch.setattr(os, "environ", os.environ.copy())
    return commands


def test_load_becomes_the_command(
    command: Run,
    fitting: Callable[..., None],
    executed: list[tuple[str, ...]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command gets its words and the variables; stdout stays its own."""
    fitting()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        command(
            *("load", GOLDEN, "--require", "program", "--on-uncovered", "eager"),
            *("--receipt", "receipt.json", "--", "serve", "--port", "80", "--json"),
        )
    captured = capsys.readouterr()
    assert executed == [("serve", "--port", "80", "--json")]
    assert captured.out == ""
    assert "target\tcpu-x86_64-v3, fits this machine" in captured.err
    mine = {n: v for n, v in os.environ.items() if n.startswith("COMPILEKIT_")}
    assert mine == {
        "COMPILEKIT_ARTIFACT": str(GOLDEN.resolve()),
        "COMPILEKIT_REQUIRE": "program",
        "COMPILEKIT_ON_UNCOVERED": "eager",
        "COMPILEKIT_RECEIPT": str(tmp_path / "receipt.json"),
    }


def test_load_without_a_command_is_the_preflight(
    command: Run, fitting: Callable[..., None], executed: list[tuple[str, ...]]
) -> None:
    """Alone, ``load`` reports on stdout and ends."""
    fitting(WARNING)
    code, out, _ = command("load", GOLDEN, "--json")
    result = json.loads(out)["result"]
    assert code == 0
    assert executed == []
    assert result["mismatches"][0]["factor"] == "transformers.version"
    assert result["buckets"] == 2


def test_load_takes_requirements_from_the_environment(
    command: Run,
    fitting: Callable[..., None],
    executed: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The environment counts where no option is given."""
    fitting()
    monkeypatch.setenv("COMPILEKIT_REQUIRE", "program")
    _, out, _ = command("load", GOLDEN, "--json")
    assert json.loads(out)["result"]["required"] == ["program"]


@pytest.mark.parametrize(
    ("arguments", "mismatches", "code"),
    [
        ([], (MISFIT, WARNING), 6),
        (["--require", "cache"], (), 9),
        (["--require", "programs"], (), 2),
        (["--on-uncovered", "retry"], (), 2),
        (["--expect-digest", DIGEST], (), 5),
        # What a variable that isn't set leaves must not demand nothing.
        (["--expect-digest", ""], (), 2),
        (["--expect-digest", DIGEST[:12]], (), 2),
    ],
    ids=["mismatch", "policy", "require", "uncovered", "digest", "empty", "short"],
)
def test_load_refuses(
    arguments: list[str],
    mismatches: tuple[errors.Mismatch, ...],
    code: int,
    command: Run,
    fitting: Callable[..., None],
    executed: list[tuple[str, ...]],
) -> None:
    """Whatever is wrong, the command isn't run and the exit code says what it was."""
    fitting(*mismatches)
    found, out, err = command("load", GOLDEN, *arguments, "--", "serve")
    assert (found, out) == (code, "")
    assert err.startswith("error: ")
    assert executed == []


def test_load_of_no_program_is_exit_13(
    command: Run, fitting: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that can't be run is named."""
    fitting()
    monkeypatch.setattr(os, "environ", os.environ.copy())
    code, _, err = command("load", GOLDEN, "--", "no-such-program")
    assert code == errors.ResourceError.exit_code
    assert "can't run no-such-program" in err


# --- target ---------------------------------------------------------------------------


def test_target_list_says_what_runs_here(
    command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target whose features this CPU lacks is listed with what it lacks."""
    monkeypatch.setattr("compilekit.targets.cpu_flags", lambda: frozenset(["avx2"]))
    monkeypatch.setattr("compilekit.targets.machine", lambda: "x86_64")
    code, out, _ = command("target", "list")
    assert code == 0
    [row] = [line for line in out.splitlines() if "\tcpu-x86_64-v4\t" in line]
    assert "no: lacks " in row
    assert "avx512f" in row


def test_target_list_asks_for_the_gpu(
    command: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A GPU's code runs on its compute capability, and nowhere without a driver."""
    from compilekit.cli import target
    from compilekit.runtime import gpu

    def verdicts() -> dict[str, str]:
        _, out, _ = command("target", "list")
        rows = [line.split("\t") for line in out.splitlines()]
        return {row[1]: row[-1] for row in rows if row[0] == "target"}

    monkeypatch.setattr("compilekit.targets.machine", lambda: "x86_64")
    monkeypatch.setattr(target, "_DRIVERS", (tmp_path / "driver",))
    assert verdicts()["nvidia-h200"] == "no: no NVIDIA GPU here"
    (tmp_path / "driver").touch()
    h200 = gpu.Gpu("NVIDIA H200", 9, 0, 132, 232448, (13, 0))
    monkeypatch.setattr(gpu, "gpu_here", lambda: h200)
    found = verdicts()
    assert (found["nvidia-h200"], found["nvidia-h100-sxm"]) == ("yes", "yes")
    assert found["nvidia-a100"].startswith("no: this is NVIDIA H200")
    monkeypatch.setattr(gpu, "gpu_here", lambda: None)
    assert verdicts()["nvidia-h200"].startswith("no: this is ")


def test_target_show_tells_where_values_come_from(command: Run) -> None:
    """Each value of a target has its mark."""
    _, out, _ = command("target", "show", "cpu-x86_64-v3")
    rows = [line.split("\t") for line in out.splitlines() if line.startswith("value\t")]
    assert rows
    assert {row[2] for row in rows} <= {"probed", "datasheet", "assumed"}


def test_sigterm_is_not_swallowed() -> None:
    """SIGTERM ends the process as any other: no handler of ours delays a container."""
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# --- explain --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Found:
    """The part of an explained bucket that the command line shows."""

    entry: str = "forward"
    bucket: str = "b1_s32"
    graphs: tuple[int, ...] = (1, 2)
    ops: int = 5
    breaks: tuple[Any, ...] = ()
    eager: tuple[Any, ...] = ()
    stopped: Any = None
    counted: int = 0
    passed: bool = True
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Explained:
    """The same of a whole result."""

    buckets: tuple[Found, ...]
    passed: bool
    allowed: int = 0
    full_graph: bool = True
    torch: str = "2.13.0"


@pytest.mark.parametrize("passed", [True, False])
def test_explain_is_a_gate(
    passed: bool, command: Run, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every break with its line and its fix; exit 3 if there are more than allowed."""
    graph_break = types.SimpleNamespace(
        file=str(Path.cwd() / "model.py"),
        line=12,
        function="forward",
        source="if x.sum() > 0:",
        reason="It branches.",
        consequence="The graph is cut in two here.",
        fix="Use torch.where.",
        full_graph=True,
    )
    past = types.SimpleNamespace(**{**vars(graph_break), "full_graph": False})
    found = Found(
        breaks=(past,) if passed else (graph_break,),
        counted=0 if passed else 1,
        passed=passed,
        notes=("A note.",),
    )
    stand_in(
        monkeypatch,
        "compilekit.compiler.explain",
        explain=lambda config, **options: Explained((found,), passed),
    )
    code, out, err = command("explain", config)
    assert code == (0 if passed else errors.GraphBreakError.exit_code)
    assert ("next: compilekit build" in err) is passed
    rows = [line.split("\t") for line in out.splitlines() if line.startswith("break\t")]
    assert "note: A note." in out
    not_counted = " A build gets past it, so it isn't counted." if passed else ""
    assert rows[0][3:] == [
        "model.py:12 in forward",
        "if x.sum() > 0:",
        "It branches.",
        f"The graph is cut in two here.{not_counted}",
        "Use torch.where.",
    ]
    bucket = next(line for line in out.splitlines() if line.startswith("bucket\t"))
    assert bucket.split("\t")[-3:] == (
        ["1", "0", "passed"] if passed else ["1", "1", "failed"]
    )


# --- bench ----------------------------------------------------------------------------


def test_bench_shows_medians_by_row_and_by_bucket(
    command: Run, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table by row and one by bucket from the raw samples; a failed row is named."""
    from compilekit.bench import startup

    def sample(first_ms: float) -> types.SimpleNamespace:
        bucket = types.SimpleNamespace(
            entry="forward",
            bucket="b1_s32",
            first_ms=first_ms,
            steady_ms=1.0,
            max_abs_diff=3e-7,
        )
        return types.SimpleNamespace(
            import_torch_ms=1000.0,
            import_code_ms=500.0,
            model_ms=200.0,
            attach_ms=10.0,
            attach_phases_ms={"bind": 2 * first_ms},
            ready_ms=10.0 + first_ms,
            overhead_ms=9.0 + first_ms,
            buckets=(bucket,),
            peak_rss_bytes=600_000_000,
            processes=0,
            max_abs_diff=3e-7,
        )

    def row(name: str, *samples: Any, error: str = "") -> types.SimpleNamespace:
        return types.SimpleNamespace(
            name=name,
            samples=samples,
            build_seconds=4.5,
            shipped_bytes=4096,
            error=error,
        )

    result = types.SimpleNamespace(
        setting=types.SimpleNamespace(model="toy", threads=1),
        repeat=3,
        rows=(
            row("compilekit", sample(3.0), sample(5.0), sample(4.0)),
            row("mega", error="no g++"),
        ),
        as_json=dict,
    )
    seen: dict[str, Any] = {}

    def bench(config: Any, **options: Any) -> types.SimpleNamespace:
        seen.update(options)
        return result

    monkeypatch.setattr(startup, "run", bench)
    line = ("bench", "startup", config, "--rows", "compilekit, mega", "--repeat", "3")
    code, out, _ = command(*line)
    lines = out.splitlines()
    assert code == errors.ResourceError.exit_code
    assert seen["rows"] == ("compilekit", "mega")
    assert (
        "start\tcompilekit\t1.500000\t0.200000\t0.010000\t0.004000\t0.014000\t0.013000"
        in lines
    )
    assert "cost\tcompilekit\t600000000\t4096\t4.500000\t0\t3e-07" in lines
    assert "part\tcompilekit\tbind\t8.0" in lines
    assert "bucket\tforward\tb1_s32\tprogram\t4.0\t1.0\t3e-07" in lines
    assert "failure\tmega\tno g++" in lines
