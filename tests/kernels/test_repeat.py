"""Repeated launches: recorded once, with launchers built as those of Triton's versions are."""

from __future__ import annotations

import pytest

from megamoe.kernels.gluon.repeat import repeated


class Map:
    """An encoded tensor map."""

    def __init__(self, name: str):
        self.name = name


class Compiled:
    """A compiled kernel whose launches are noted; descriptors are strings, "map ..."."""

    function, packed_metadata = "function", (4, 1, 1000)

    def __init__(self, launcher_of, scratch: int = 0):
        self.launched: list[tuple] = []
        self.encoded: list[str] = []
        self.run = launcher_of(self, scratch)

    def driver(self, *arguments) -> None:
        self.launched.append(arguments)

    def encode(self, argument):
        if not (isinstance(argument, str) and argument.startswith("map")):
            return [argument]
        self.encoded.append(argument)
        return [Map(argument), 128, 64]


class FlatArguments:
    """Kernel arguments follow the others one by one (triton 3.6)."""

    def __init__(self, compiled, scratch):
        self.global_scratch_size, self.profile_scratch_size = scratch, 0
        launcher, encode = compiled.driver, compiled.encode

        def inner(*args):
            return launcher(*args[:7], *[x for argument in args[7:] for x in encode(argument)])

        self.launch = inner

    def __call__(self, x, y, z, stream, function, *args):
        self.launch(x, y, z, stream, function, False, True, *args)


class ListedArguments:
    """Kernel arguments are one list at the end (triton 3.7 and later)."""

    def __init__(self, compiled, scratch):
        self.global_scratch_size, self.profile_scratch_size = scratch, 0
        launcher, encode = compiled.driver, compiled.encode

        def inner(*args):
            return launcher(*args[:-1], [x for argument in args[-1] for x in encode(argument)])

        self.launch = inner

    def __call__(self, x, y, z, stream, function, metadata, launch_metadata, enter, exit_, *args):
        self.launch(x, y, z, stream, function, False, True, metadata, launch_metadata, enter, exit_, args)


class OtherLauncher(FlatArguments):
    """Has no function in it that could be replaced."""

    def __init__(self, compiled, scratch):
        super().__init__(compiled, scratch)
        self.launch = lambda *args: compiled.driver(*args)


def flat(arguments) -> list:
    found = []
    for x in arguments:
        found += flat(x) if isinstance(x, (list, tuple)) else [x.name if isinstance(x, Map) else x]
    return found


@pytest.mark.parametrize("launcher", [FlatArguments, ListedArguments])
def test_same_arguments_encoded_for_two_launches_only(launcher):
    usual, compiled = Compiled(launcher), Compiled(launcher)
    values = ("map a", 1 << 40, 7, "map b", 3)
    launch = repeated(compiled, 132, values)
    assert not compiled.launched
    for count, stream in enumerate((11, 0, 22, 33), 1):
        usual.run(132, 1, 1, stream, usual.function, usual.packed_metadata, None, None, None, *values)
        launch(stream)
        # The usual way once, recorded once, and not again.
        assert compiled.encoded == min(count, 2) * ["map a", "map b"]
    assert [flat(call) for call in compiled.launched] == [flat(call) for call in usual.launched]


@pytest.mark.parametrize("launcher, scratch", [(OtherLauncher, 0), (FlatArguments, 64)])
def test_the_usual_way_where_there_is_no_short_one(launcher, scratch):
    usual, compiled = Compiled(launcher, scratch), Compiled(launcher, scratch)
    launch = repeated(compiled, 5, ("map a", 2))
    for stream in (9, 8, 7):
        launch(stream)
        usual.run(5, 1, 1, stream, usual.function, usual.packed_metadata, None, None, None, "map a", 2)
    assert [flat(call) for call in compiled.launched] == [flat(call) for call in usual.launched]
