"""``headrace keys FOLDER``: the CURVE keys without which no link leaves the machine."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

from shared.curve import SERVER_SECRET
from shared.errors import StartupError
from shared.lifecycle import EXIT_CONFIG, EXIT_OK
from shared.transport import make_curve_keys


def main(argv: Sequence[str]) -> int:
    """Write new keys into a folder, or leave a folder that has keys as it is. Returns an exit code."""
    parser = argparse.ArgumentParser(
        prog="headrace keys",
        description="Write the CURVE keys of tcp links into FOLDER (made with mode 0700). Give the folder to every "
        "service with --curve-dir. A folder that holds keys is left as it is.",
    )
    parser.add_argument("folder", type=pathlib.Path, metavar="FOLDER")
    folder: pathlib.Path = parser.parse_args(list(argv)).folder
    try:
        if (folder / SERVER_SECRET).exists():
            print(f"{folder} holds keys already; they are kept")
            return EXIT_OK
        make_curve_keys(folder)
    except (StartupError, OSError) as error:
        print(f"headrace keys: {error}", file=sys.stderr)
        return EXIT_CONFIG
    print(f"wrote new keys to {folder}")
    return EXIT_OK
