"""Processes of tests/test_server_contract.py; each prints one JSON document.

python contract.py forked|memory|shared|two ARTIFACT [MORE...]
"""

import gc
import json
import os
import sys

sys.path.insert(0, __file__.rpartition("/")[0])

import torch
from tower_model import Tower

import compilekit

CALL = {"x": torch.ones(3, 100, 16), "mask": torch.ones(3, 100, dtype=torch.int64)}


def made(seed: int = 0) -> Tower:
    """A tower; eager is asked for its answer before anything is attached."""
    torch.manual_seed(seed)
    return Tower().eval()


def worst(model: Tower, expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of a call from eager's answer, as a part of it."""
    found = model(**CALL)
    return max(
        float((found[n] - t).abs().max() / t.abs().max()) for n, t in expected.items()
    )


def forked(artifact: str) -> dict[str, object]:
    """Attach, fork four workers, and only they call, as a preloading server does."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = Tower().eval()
    compilekit.attach(model, artifact, require="program")
    reader, writer = os.pipe()
    children = []
    for _ in range(4):
        child = os.fork()
        if not child:
            # The class's own method: the instance has the program in its place.
            expected = Tower.forward(model, **CALL)
            os.write(writer, f"{worst(model, expected)}\n".encode())
            os._exit(0)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    os.close(writer)
    with os.fdopen(reader) as stream:
        return {"codes": codes, "worst": max(map(float, stream))}


def resident() -> int:
    """Bytes of this process that are its own."""
    gc.collect()
    with open("/proc/self/smaps_rollup", encoding="ascii") as stream:
        lines = dict(line.split()[:2] for line in list(stream)[1:])
    return 1024 * (int(lines["Private_Dirty:"]) + int(lines["Private_Clean:"]))


def memory(artifact: str) -> dict[str, object]:
    """What the first attach adds, and what fifty more add."""
    torch.set_num_threads(1)
    model = made()
    model(**CALL)
    compilekit.open(artifact)
    grown = [resident()]
    for count in (1, 10, 50):
        for _ in range(count):
            receipt = compilekit.attach(model, artifact)
            model(**CALL)
            receipt.detach()
        grown.append(resident())
    return {"first": grown[1] - grown[0], "more": grown[3] - grown[2]}


def shared(artifact: str) -> dict[str, object]:
    """Where this process has the artifact's kernels from: device and inode of each."""
    model = made()
    expected = model(**CALL)
    if len(sys.argv) > 3:
        compilekit.attach  # noqa: B018 - imports the runtime
        # The other user may not be let into this environment.
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: F401

        os.setgroups([])
        os.setgid(int(sys.argv[3]))
        os.setuid(int(sys.argv[3]))
    compilekit.attach(model, artifact, require="program")
    difference = worst(model, expected)
    with open("/proc/self/maps", encoding="utf-8") as stream:
        words = [line.split(None, 5) for line in stream]
    places = {
        word[5].strip(): f"{word[3]} {word[4]}"
        for word in words
        if len(word) == 6 and ("/kernels/" in word[5] or "memfd:" in word[5])
    }
    try:
        with open(f"{artifact}/manifest.json", "ab"):
            can_write = True
    except OSError:
        can_write = False
    return {"worst": difference, "places": places, "can_write": can_write}


def two(artifact: str) -> dict[str, object]:
    """Two models of one artifact and one of another, side by side; one is detached."""
    other = sys.argv[3]
    models = [made(1), made(2), made(3)]
    expected = [model(**CALL) for model in models]
    places = [artifact, artifact, other]
    receipts = [
        compilekit.attach(model, place)
        for model, place in zip(models, places, strict=True)
    ]
    pairs = list(zip(models, expected, strict=True))
    before = [worst(*pair) for pair in pairs]
    receipts[0].detach()
    after = [worst(*pair) for pair in pairs]
    return {
        "before": before,
        "after": after,
        "attached": ["forward" in vars(model) for model in models],
        "artifacts": [receipt.artifact for receipt in receipts],
        "apart": float((expected[0]["hidden"] - expected[1]["hidden"]).abs().max()),
    }


with torch.inference_mode():
    answer = globals()[sys.argv[1]](sys.argv[2])
sys.stdout.write(json.dumps(answer))
