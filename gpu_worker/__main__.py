"""``python -m gpu_worker``"""

from __future__ import annotations

import os
import sys

from gpu_worker.device_lease import device_lease
from gpu_worker.early_start import start_early
from gpu_worker.environment import prepare_environment
from gpu_worker.worker import Worker
from shared.config import WORKER, Settings
from shared.lifecycle import EXIT_OK, install_signal_handlers, run_service


def main(settings: Settings) -> None:
    prepare_environment()
    lease = device_lease(settings)
    if lease.take():
        start_early(lease.device)
    worker = Worker(settings, lease)
    install_signal_handlers(worker.stop)
    worker.run()
    # A thread that loads, or waits for the device, cannot be stopped, and the interpreter must not go down under it.
    sys.stderr.flush()
    os._exit(EXIT_OK)


if __name__ == "__main__":
    run_service(WORKER, main, "Runs a model for one engine: weights, KV cache, attention, sampling.")
