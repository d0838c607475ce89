"""``python -m core_engine``"""

from __future__ import annotations

from core_engine.engine import Engine
from shared.config import ENGINE, Settings
from shared.lifecycle import install_signal_handlers, run_service


def main(settings: Settings) -> None:
    engine = Engine(settings)
    install_signal_handlers(engine.stop)
    engine.run()


if __name__ == "__main__":
    run_service(ENGINE, main, "Decides what each worker computes in each step, and keeps its KV blocks.")
