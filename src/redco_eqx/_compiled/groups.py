"""Groups of devices in a compiled program, named by the axes of the mesh.

HLO names a device by its position in `mesh.devices.flat`.
"""

import math
import re
from functools import lru_cache
from itertools import pairwise

import numpy as np

Sizes = tuple[tuple[str, int], ...]  # the mesh: names and sizes of its axes

_LIST = r"\{(?:\{[\d,]*\}[,\s]*)*\}"
_IOTA = r"\[[\d,]+\](?:T\([\d,]+\))?"
_AXIS = r"'[^']*'|[\w.\-]+"
_MESH = rf"mesh\[([^\]]*)\](?:, device_ids=\(({_IOTA}|[\d,]+)\))? \{{([^}}]*)\}}"
GROUPS = re.compile(rf"replica_groups=({_LIST}|\[[\d,]+\]<={_IOTA}|{_MESH})")
PAIRS = re.compile(rf"source_target_pairs=({_LIST})")


@lru_cache(maxsize=1024)
def group_axes(printed: str, mesh: Sizes) -> tuple[tuple[str, ...], bool, int]:
    """The axes along which members of a group differ; whether every group is all of their devices; the
    size of the largest group."""
    shape = tuple(size for _, size in mesh)
    differing: set[tuple[int, ...]] = set()
    whole, largest = True, 1
    for group in _groups(printed, math.prod(shape)):
        members = sorted(set(group))
        if members[-1] >= math.prod(shape):
            raise ValueError(f"communication: device {members[-1]} is not in the mesh {dict(mesh)}.")
        coordinates = np.unravel_index(members, shape)
        axes = tuple(i for i, along in enumerate(coordinates) if len(set(along.tolist())) > 1)
        differing.add(axes)
        whole = whole and len(members) == math.prod(shape[i] for i in axes)
        largest = max(largest, len(members))
    named = tuple(name for i, (name, _) in enumerate(mesh) if any(i in axes for axes in differing))
    return named, whole and len(differing) == 1, largest


def _groups(printed: str, num_devices: int) -> list[list[int]]:
    if printed.startswith("{"):
        # {{0,1},{2,3}}, or {} for one group of all.
        groups = [_numbers(group) for group in re.findall(r"\{([\d,]*)\}", printed[1:-1])]
        return groups or [list(range(num_devices))]
    if printed.startswith("["):
        # [4,2]<=[2,4]T(1,0): 4 groups of 2, cut from the numbers in shape [2,4], transposed.
        shape, numbers = printed.split("<=")
        return _iota(numbers).reshape(_numbers(shape)).tolist()
    # mesh['a'=2,'b'=8], device_ids=([8,2]T(1,0)) {'a','b':(2)4}: a group lies along 'a', and along the
    # 4 of 'b' that come after its outer 2. The axes are of XLA's own making.
    found = re.fullmatch(_MESH, printed)
    assert found is not None  # by GROUPS
    sizes, listed, grouped = found.groups()
    wanted = re.findall(rf"({_AXIS})(?::\((\d+)\)(\d+))?", grouped)
    dims: list[int] = []
    inner: list[int] = []
    for name, size in re.findall(rf"({_AXIS})=(\d+)", sizes):
        parts = {int(pre or 1): int(n or size) for axis, pre, n in wanted if axis == name}
        cuts = sorted({1, int(size), *parts, *(pre * n for pre, n in parts.items())})
        for low, high in pairwise(cuts):
            inner += [len(dims)] if low in parts else []
            dims.append(high // low)
    devices = np.arange(math.prod(dims))
    if listed is not None:
        devices = _iota(listed) if "[" in listed else np.array(_numbers(listed))
    order = [i for i in range(len(dims)) if i not in inner] + inner
    group_size = math.prod(dims[i] for i in inner)
    return devices.reshape(dims).transpose(order).reshape(-1, group_size).tolist()


def _iota(printed: str) -> np.ndarray:
    """`[2,4]T(1,0)`: the numbers from 0 in that shape, transposed, in a row."""
    shape, _, order = printed.partition("T")
    dims = _numbers(shape)
    numbers = np.arange(math.prod(dims)).reshape(dims)
    return numbers.transpose(_numbers(order) if order else None).reshape(-1)


def _numbers(printed: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", printed)]
