"""``python -m megamoe.compat.deep_gemm SCRIPT [ARGUMENT ...]``: runs a script whose ``deep_gemm`` is this package."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from megamoe.compat.deep_gemm.alias import install, install_for_children


def main(arguments: list[str]) -> None:
    """Runs the script as ``__main__`` with ``sys.argv`` = ``arguments`` and its folder first on the import path."""
    if not arguments or not Path(arguments[0]).is_file():
        problem = f"{arguments[0]!r} is not a file" if arguments else "SCRIPT is missing"
        print(f"usage: python -m megamoe.compat.deep_gemm SCRIPT [ARGUMENT ...]\n{problem}", file=sys.stderr)
        raise SystemExit(2)
    install()
    install_for_children()
    sys.argv[:] = arguments
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
