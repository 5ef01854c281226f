"""How many losses contain none of a family of sets, exactly and without enumerating them where that is avoidable.

Points that no set connects are lost independently of each other, so the family falls apart into components, whose
polynomials (coefficient i: survivable losses of i points) multiply. Equal components are raised to a power.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from gemini_ft.contracts.errors import ConfigurationError

__all__ = [
    "NoExactMethodError",
    "num_survivable",
    "polynomial_power",
    "polynomial_product",
    "survival_probability",
]

_Sets = tuple[tuple[int, ...], ...]
_Weight = TypeVar("_Weight", int, float)

_MAX_SWEEP_STATES = 200_000
_MAX_ENUMERATED = 500_000


class NoExactMethodError(ConfigurationError):
    """The sets overlap too much to count exactly; estimate with Monte Carlo. Facts: num_points, num_sets."""


def num_survivable(num_points: int, sets: Collection[frozenset[int]], num_lost: int) -> int:
    """Return how many of the C(num_points, num_lost) losses contain none of these distinct sets entirely.

    Raises:
        NoExactMethodError: the sets overlap too much.
    """
    smallest = min(map(len, sets), default=num_points + 1)
    if num_lost <= smallest:
        return math.comb(num_points, num_lost) - sum(len(members) == num_lost for members in sets)
    shapes, rings, num_free = _shapes(num_points, sets)
    product = polynomial_power([1, 1], num_free, num_lost)
    for shape, num_equal in shapes.items():
        power = polynomial_power(_polynomial(shape, num_lost), num_equal, num_lost)
        product = polynomial_product(product, power, num_lost)
    for ring in rings[:-1]:
        size = min(ring[0], num_lost)
        product = polynomial_product(product, [_num_ring_survivable(*ring, lost) for lost in range(size + 1)], num_lost)
    if not rings:
        return product[num_lost] if num_lost < len(product) else 0
    return sum(
        ways * _num_ring_survivable(*rings[-1], num_lost - lost)
        for lost, ways in enumerate(product)
        if num_lost - lost <= rings[-1][0]
    )


def survival_probability(num_points: int, sets: Collection[frozenset[int]], loss_probability: float) -> float:
    """Return the probability that no set is lost entirely when each point is lost independently.

    Raises:
        NoExactMethodError: the sets overlap too much.
    """
    shapes, rings, _ = _shapes(num_points, sets)
    probability = 1.0
    for shape, num_equal in shapes.items():
        if len(shape) == 1:
            survived = 1 - loss_probability ** len(shape[0])
        else:
            weight = _sweep(shape, 1.0, lambda w: w * loss_probability, lambda w: w * (1 - loss_probability))
            if weight is None:
                raise _too_entangled(shape)
            survived = weight
        probability *= survived**num_equal
    for size, window in rings:
        probability *= _ring_survival_probability(size, window, loss_probability)
    return probability


def polynomial_power(polynomial: Sequence[int], exponent: int, degree: int) -> list[int]:
    """Return the coefficients up to `degree` of a power of a polynomial whose constant term is 1 (Miller's formula)."""
    power = [1]
    for j in range(1, min(degree, exponent * (len(polynomial) - 1)) + 1):
        terms = range(1, min(j, len(polynomial) - 1) + 1)
        power.append(sum(((exponent + 1) * i - j) * polynomial[i] * power[j - i] for i in terms) // j)
    return power


def polynomial_product(left: Sequence[int], right: Sequence[int], degree: int) -> list[int]:
    """Return the coefficients up to `degree` of a product of polynomials."""
    product = [0] * (min(degree, len(left) + len(right) - 2) + 1)
    for i, a in enumerate(left):
        for j, b in enumerate(right[: len(product) - i]):
            product[i + j] += a * b
    return product


def _shapes(num_points: int, sets: Collection[frozenset[int]]) -> tuple[Counter[_Sets], list[tuple[int, int]], int]:
    """Return the components that are no rings, counted by shape; the rings, as (size, window); the points in no set."""
    minimal = _minimal(sets)
    shapes: Counter[_Sets] = Counter()
    rings = []
    for component in _components(minimal):
        if len(component) > 1 and _is_ring(component):
            rings.append((len(component), len(component[0])))
        else:
            shapes[_relabelled(component)] += 1
    num_free = num_points - len(frozenset[int]().union(*minimal))
    return shapes, sorted(rings), num_free


def _minimal(sets: Collection[frozenset[int]]) -> list[frozenset[int]]:
    """Without the sets that contain another one: losing those loses the other as well."""
    if len({len(members) for members in sets}) == 1:
        return list(set(sets))
    by_first: defaultdict[int, list[frozenset[int]]] = defaultdict(list)
    minimal = []
    for members in sorted(set(sets), key=lambda members: (len(members), sorted(members))):
        if not any(inner <= members for point in members for inner in by_first.get(point, ())):
            by_first[min(members)].append(members)
            minimal.append(members)
    return minimal


def _components(sets: Sequence[frozenset[int]]) -> list[list[frozenset[int]]]:
    parent: dict[int, int] = {}

    def root(point: int) -> int:
        while parent.setdefault(point, point) != point:
            parent[point] = point = parent[parent[point]]
        return point

    for members in sets:
        first, *others = members
        for point in others:
            parent[root(point)] = root(first)
    components: defaultdict[int, list[frozenset[int]]] = defaultdict(list)
    for members in sets:
        components[root(min(members))].append(members)
    return list(components.values())


def _is_ring(sets: Sequence[frozenset[int]]) -> bool:
    """True when the sets are all windows of one length over a circle of their points, in whatever order."""
    size, window = len(sets), len(sets[0])
    containing: defaultdict[int, list[frozenset[int]]] = defaultdict(list)
    for members in sets:
        for point in members:
            containing[point].append(members)
    # On a smaller circle the neighbours cannot be told by the sets that they share; the sweep is quick there.
    if len(containing) != size or size < 2 * window - 1 or any(len(members) != window for members in sets):
        return False

    def windows(circle: Sequence[int]) -> set[frozenset[int]]:
        twice = [*circle, *circle[: window - 1]]
        return {frozenset(twice[start : start + window]) for start in range(size)}

    if windows(sorted(containing)) == set(sets):
        return True
    neighbours = {}
    for point, around in containing.items():
        shared = Counter(other for members in around for other in members)
        neighbours[point] = [other for other, times in shared.items() if other != point and times == window - 1]
        if len(neighbours[point]) != 2:
            return False
    circle = [min(containing)]
    previous = neighbours[circle[0]][0]
    while len(circle) < size:
        back, forth = neighbours[circle[-1]]
        previous, following = circle[-1], forth if back == previous else back
        circle.append(following)
    return windows(circle) == set(sets)


def _relabelled(sets: Sequence[frozenset[int]]) -> _Sets:
    """The sets over 0, 1, ... in breadth-first order, which keeps few sets open and makes equal shapes look equal."""
    containing: defaultdict[int, list[frozenset[int]]] = defaultdict(list)
    for members in sorted(sets, key=sorted):
        for point in members:
            containing[point].append(members)
    order = [min(containing, key=lambda point: (len(containing[point]), point))]
    label = {order[0]: 0}
    for point in order:
        for members in containing[point]:
            for other in sorted(members, key=lambda other: (len(containing[other]), other)):
                if other not in label:
                    label[other] = len(order)
                    order.append(other)
    return tuple(sorted(tuple(sorted(label[point] for point in members)) for members in sets))


def _polynomial(shape: _Sets, max_lost: int) -> list[int]:
    """Coefficient i: how many losses of i points the component survives, for i up to `max_lost`."""
    num_points = max(map(max, shape)) + 1
    if len(shape) == 1:
        return [math.comb(num_points, lost) for lost in range(num_points)]
    degree = min(max_lost, num_points)
    # One integer holds all coefficients, `width` bits each; a coefficient is at most a binomial of the points.
    most = math.comb(num_points, min(degree, num_points // 2))
    width = most.bit_length()
    mask = (1 << width * (degree + 1)) - 1
    packed = _sweep(shape, 1, lambda counts: counts << width & mask, lambda counts: counts)
    if packed is not None:
        return [packed >> width * lost & (1 << width) - 1 for lost in range(degree + 1)]
    if most <= _MAX_ENUMERATED:
        return _enumerated(shape, num_points, degree)
    raise _too_entangled(shape)


def _sweep(
    shape: _Sets, start: _Weight, lose: Callable[[_Weight], _Weight], keep: Callable[[_Weight], _Weight]
) -> _Weight | None:
    """Return the summed weight of all survivable losses of the component; None when that takes too many states.

    Decides point after point. The state is which of the sets that are under way have lost all their members so far.
    """
    containing: defaultdict[int, list[int]] = defaultdict(list)
    for index, members in enumerate(shape):
        for point in members:
            containing[point].append(index)
    bits: dict[int, int] = {}
    unused: list[int] = []
    states = {0: start}
    num_bits = num_states = 0
    for point in range(len(containing)):
        opening = closing = 0
        for index in containing[point]:
            if shape[index][0] == point:
                if not unused:
                    unused.append(1 << num_bits)
                    num_bits += 1
                bits[index] = unused.pop()
                opening |= bits[index]
            if shape[index][-1] == point:
                closing |= bits[index]
        touched = sum(bits[index] for index in containing[point])
        following: dict[int, _Weight] = {}
        for threatened, weight in states.items():
            kept = threatened & ~touched
            following[kept] = following.get(kept, 0) + keep(weight)
            lost = threatened | opening
            if not lost & closing and (lost_weight := lose(weight)):
                following[lost] = following.get(lost, 0) + lost_weight
        unused += [bits[index] for index in containing[point] if shape[index][-1] == point]
        states = following
        num_states += len(states)
        if num_states > _MAX_SWEEP_STATES:
            return None
    return states[0]


def _enumerated(shape: _Sets, num_points: int, degree: int) -> list[int]:
    closing: defaultdict[int, list[int]] = defaultdict(list)
    for members in shape:
        closing[members[-1]].append(sum(1 << point for point in members))
    counts = [0] * (degree + 1)

    def extend(first: int, chosen: int, num_chosen: int) -> None:
        counts[num_chosen] += 1
        if num_chosen < degree:
            for point in range(first, num_points):
                grown = chosen | 1 << point
                if all(members & ~grown for members in closing[point]):
                    extend(point + 1, grown, num_chosen + 1)

    extend(0, 0, 0)
    return counts


def _num_ring_survivable(size: int, window: int, num_lost: int) -> int:
    """Ways to lose points of a circle without losing `window` in a row.

    Each gap between two survivors loses fewer than `window`: inclusion-exclusion over the gaps, for a circle cut at a
    survivor; `size` turns of it show each loss once for every survivor.
    """
    num_left = size - num_lost
    if num_left == 0:
        return 0
    ways = sum(
        (-1 if j % 2 else 1) * math.comb(num_left, j) * math.comb(num_lost - window * j + num_left - 1, num_left - 1)
        for j in range(min(num_left, num_lost // window) + 1)
    )
    return size * ways // num_left


def _ring_survival_probability(size: int, window: int, p: float) -> float:
    """Probability that no `window` neighbours on a circle of independent points are all lost."""
    line = [1.0]
    for length in range(1, size - 1):
        run_then_line = sum(p**run * (1 - p) * line[length - 1 - run] for run in range(min(window, length)))
        line.append(run_then_line + (p**length if length < window else 0.0))
    # Around the place where the circle is cut lies one run, which starts at any of its run + 1 points.
    return sum((run + 1) * p**run * (1 - p) ** 2 * line[size - run - 2] for run in range(window))


def _too_entangled(shape: _Sets) -> NoExactMethodError:
    num_points = max(map(max, shape)) + 1
    return NoExactMethodError(
        f"no exact method covers this placement: {len(shape)} replica sets hang together over {num_points} points; "
        "estimate it with Monte Carlo (gemini_ft.planning.monte_carlo.estimate_recovery)",
        num_points=num_points,
        num_sets=len(shape),
    )
