"""gunicorn for serve.py: attach once, fork, then warm each worker up."""

from __future__ import annotations

import os
from typing import Any

bind = "0.0.0.0:8000"
workers = 2
preload_app = True
# Heartbeats are files; a container's root may be read-only.
worker_tmp_dir = "/dev/shm"
control_socket_disable = True


def post_worker_init(worker: Any) -> None:
    """Before its first request, in the worker: threads are made after the fork."""
    import serve
    import torch

    # Its share of the cores: threads of two workers on one core wait for each other.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // workers))
    # SIGTERM only marks the worker: it ends after the bucket that it's at.
    serve.warm_up(lambda: worker.alive)
