"""Device kernels compile for Hopper on a machine without a GPU, without spills and within shared memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs triton")

from megamoe.kernels import mega, offline, offline_gemm, offline_gemm_k, offline_mega  # noqa: E402
from megamoe.kernels.gluon import launch  # noqa: E402
from megamoe.kernels.tiles import K_FORMS, Problem, legal_k_tiles, legal_tiles  # noqa: E402

# launch/compile_kernels.sh compiles them all; here those that are quick to compile of each list.
SOME = {
    r"^rowwise 1x128, 4 rows, bf16$": 1,
    r"^dispatch_kernel, dispatch bf16, 16 tokens, 1 of 1$": 1,
    r"^mega_moe_bf16_kernel, mega 128 x 128, bf16, 64 tokens$": 1,
    r"^bf16 nn 128x256 .* psum \+ C to bf16$": 1,
    r"^both ways, bf16$": 1,
    r"^relu2 x weight, bf16 to fp8e4nv$": 1,
    r"^local send, K = 8, bf16$": 1,
    r"^select_kernel, 64 experts$": 1,
    r"^bf16 tn 128x256 4 stages skew 2 .* \+ C to fp32$": 1,
}


def run_offline(only: str) -> subprocess.CompletedProcess:
    # A process of its own: those that it starts import its main module again.
    command = [sys.executable, "-m", "megamoe.kernels.offline", "--arch", "sm_90a", "--only", only]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_some_of_each_kernel_compile_and_fit():
    done = run_offline("|".join(SOME))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{sum(SOME.values())} kernels, 0 failed" in done.stdout
    rows = [line.rsplit(maxsplit=3) for line in done.stdout.splitlines()[2:-1]]
    assert len(rows) == sum(SOME.values())
    for name, registers, spilled, shared in rows:
        assert 16 <= int(registers) <= 255, name
        assert int(spilled) == 0, name
        # Rings of stages fill most of it.
        assert not name.startswith(("fp8", "bf16")) or int(shared) > 100 * 1024, name


def test_a_pattern_that_names_no_kernel_fails():
    done = run_offline("no such kernel")
    assert done.returncode == 1
    assert "0 kernels, 0 failed" in done.stdout


# ---------------------------------------------------------------- the list


def test_names_are_unique():
    names = [variant.name for variant in offline.variants()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("kernel", ["fp8_gemm_kernel", "bf16_gemm_kernel"])
@pytest.mark.parametrize("parameter", ["LAYOUT", "GROUP_M", "TOGETHER", "ACTIVATION", "CLAMP", "WEIGHTED", "OUT"])
def test_the_list_has_several_values_of_each_parameter(kernel, parameter):
    found = [v for v in offline.variants() if v.kernel.fn.__name__ == kernel]
    assert len({variant.constants[parameter] for variant in found}) > 1


def test_the_list_has_every_layout_activation_and_tile_for_few_rows():
    launches = list(offline_gemm.launches())
    for name in {found.kernel.fn.__name__ for found in launches}:
        constants = [found.constants for found in launches if found.kernel.fn.__name__ == name]
        assert {c["LAYOUT"] for c in constants} == {layout.value for layout in launch.KINDS.values()}, name
        activations = {c.get("ACTIVATION") for c in constants}
        assert activations in ({None}, {activation.value for activation in launch.ACTIVATIONS.values()}), name
    fields = ("BLOCK_M", "BLOCK_N", "STAGES", "TOGETHER", "KS", "SWAP")
    listed = {tuple(found.constants[f] for f in fields) for found in launches if "KS" in found.constants}
    tiles = legal_tiles(Problem(8, 2, 512, 512, "psum", 132))
    legal = {(t.block_m, t.block_n, t.stages, t.together, t.k_blocks, t.swap) for t in tiles if not t.is_wide}
    assert legal <= listed


@pytest.mark.parametrize("form", K_FORMS)
def test_the_list_has_every_k_grouped_tile_and_result(form):
    kernel, blocks = f"k_grouped_{form.removesuffix('-blocks')}_gemm_kernel", form == "fp8-blocks"
    found = [each for each in offline_gemm_k.launches() if each.kernel.fn.__name__ == kernel]
    found = [each for each in found if each.constants.get("BLOCKS", False) == blocks]
    assert len({each.key for each in found}) == len(found)
    tiles = {(each.constants["STAGES"], each.constants.get("SKEW", 0)) for each in found}
    assert tiles == {(tile.stages, tile.skew) for tile in legal_k_tiles(form)}
    results = {(each.arguments["d_desc"].base.dtype, each.constants["ADD"]) for each in found}
    assert len(results) == 4


def test_the_list_has_every_kernel_of_a_mega_call():
    found = offline_mega.movements()
    names = {each.kernel.fn.__name__ for each in found}
    wanted = {"route_kernel", "mega_moe_kernel", "mega_moe_bf16_kernel", "combine_kernel"}
    assert names == wanted - (set() if mega.FP8_SUPPORTED else {"mega_moe_kernel"})
    routes = [each.constants for each in found if each.kernel.fn.__name__ == "route_kernel"]
    for parameter in ("STAGE", "ROWS", "FP8"):
        assert {constants[parameter] for constants in routes} == {False, True}
    for kernel in names & {"mega_moe_kernel", "mega_moe_bf16_kernel"}:
        kernels = [each.constants for each in found if each.kernel.fn.__name__ == kernel]
        skew = {"SKEW"} if kernel == "mega_moe_bf16_kernel" else set()
        for parameter in ("H", "INTER", *skew, "CHUNK", "ACTIVATION", "CLAMP", "BIAS"):
            assert len({constants[parameter] for constants in kernels}) > 1, (kernel, parameter)


def test_launchers_name_arguments_in_the_kernels_order():
    # They are passed by position.
    for found in (*offline_gemm.launches(), *offline_gemm_k.launches()):
        assert list(found.arguments) == [name for name in found.kernel.arg_names if name != "num_warps"], found.name


# ---------------------------------------------------------------- verdicts


def test_verdicts():
    Report = offline.Report
    assert Report("fine", 255, 0, 227 * 1024).verdict == ""
    assert Report("spills", 255, 8, 0).verdict == "SPILLS"
    assert Report("spills as allowed", 255, 8, 0, allowed=8).verdict == ""
    assert Report("spills more", 255, 16, 0, allowed=8).verdict == "SPILLS"
    assert Report("too large", 32, 0, 227 * 1024 + 1).verdict == "DOES NOT FIT"
    assert Report("broken", 32, 0, 0, complaint="an error").verdict == "an error"


LOG = """ptxas info    : Compiling entry function 'kernel' for 'sm_90a'
ptxas info    : Function properties for kernel
    {stack} bytes stack frame, {stack} bytes spill stores, 4 bytes spill loads
ptxas info    : Used 168 registers, used 10 barriers
"""


def test_the_assemblers_log_is_understood():
    assert offline.read_log(LOG.format(stack=0)) == (168, 0, "")
    assert offline.read_log(LOG.format(stack=104)) == (168, 104, "")
    assert offline.read_log("") is None
    warning = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "insufficient register resources for the wgmma pipeline in function 'kernel'"
    )
    assert offline.read_log(LOG.format(stack=0) + warning) == (168, 0, warning)
    warning = "ptxas warning : setmaxnreg ignored to maintain minimum register requirements"
    assert offline.read_log(LOG.format(stack=0) + warning) == (168, 0, warning)


def test_a_kernel_that_does_not_compile_is_reported():
    class Broken:
        name = "broken"

        def compile(self):
            raise RuntimeError("outer") from ValueError("first\nand second line")

    report = offline.compile_variant(Broken())
    assert report.verdict == "ValueError: first and second line"


def test_allowed_spills_have_reasons_and_name_kernels_of_the_list():
    kernels = {variant.kernel.fn.__name__ for variant in offline.variants()}
    for spill in offline.ALLOWED_SPILLS:
        assert spill.reason and spill.kernel in kernels
        applies = [v for v in offline.variants() if v.kernel.fn.__name__ == spill.kernel and spill.applies(v.constants)]
        others = [v for v in offline.variants() if v.kernel.fn.__name__ == spill.kernel and v not in applies]
        assert applies and others


def test_a_brief_run_has_every_kernel():
    everything, brief = offline.variants(), [offline.variants()[index] for index in offline.chosen_variants(brief=True)]
    names = [variant.kernel.fn.__name__ for variant in brief]
    assert set(names) == {variant.kernel.fn.__name__ for variant in everything}
    for name in set(names):
        forms = sum(variant.kernel.fn.__name__ == name for variant in everything)
        gluon = "gemm" in name or name.startswith(("mega_moe", "cast_", "activation_backward_"))
        assert names.count(name) == (-(-forms // 8) if gluon else 1), name
    assert len(offline.chosen_variants("^combine_kernel", brief=True)) == 1
    assert len(offline.chosen_variants("^combine_kernel")) > 1
