"""The programs of this folder run by scripts, not by pytest; what they compute with is tested beside them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
