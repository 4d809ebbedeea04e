"""``python -m megamoe.compat.deep_gemm SCRIPT [ARGUMENT ...]``: runs a script whose ``deep_gemm`` is this package.

With ``--checks FUNCTION[,FUNCTION ...]`` before it: calls these functions of a test script and prints how many of their
comparisons passed.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from megamoe.compat.deep_gemm.alias import install, install_for_children

USAGE = "usage: python -m megamoe.compat.deep_gemm [--checks FUNCTION[,FUNCTION ...]] SCRIPT [ARGUMENT ...]"


def main(arguments: list[str]) -> None:
    """Runs the script as ``__main__`` with ``sys.argv`` = ``arguments`` and its folder first on the import path.

    With ``--checks`` it is imported instead, and the exit status is 1 if a function failed or compared nothing.
    """
    functions = None
    if len(arguments) > 1 and arguments[0] == "--checks":
        functions, arguments = arguments[1].split(","), arguments[2:]
    if not arguments or not Path(arguments[0]).is_file():
        problem = f"{arguments[0]!r} is not a file" if arguments else "SCRIPT is missing"
        print(f"{USAGE}\n{problem}", file=sys.stderr)
        raise SystemExit(2)
    install()
    install_for_children()
    sys.argv[:] = arguments
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    if functions is None:
        runpy.run_path(arguments[0], run_name="__main__")
        return
    from megamoe.compat.deep_gemm import checks

    counts = checks.run(arguments[0], functions)
    for name, count in counts.items():
        print(f"{name}: {count}", flush=True)
    raise SystemExit(any(count.failure is not None or not count.made for count in counts.values()))


if __name__ == "__main__":
    main(sys.argv[1:])
