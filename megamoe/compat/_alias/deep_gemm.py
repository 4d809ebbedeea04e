"""What ``import deep_gemm`` finds in child processes of scripts that the runner started."""

from __future__ import annotations

from megamoe.compat.deep_gemm.alias import install

install()
