"""Liveness: bytes of non-model data at each moment.

In: the segments of both graphs, and values for symbolic sizes. Out: for each moment the bytes held
across it and its peak. Sizes come from FakeTensors; views share their root's storage, which is
counted once and lives until the last use of any of them. Rewrites nothing.

What lives how long:

- inputs of the forward (user inputs, buffers) and constants: the whole step, since the caller
  holds them; anchors count nothing
- what the forward saves: from its segment to its last use in the backward
- what the forward returns to the user: to the end of the step
- tangents: from the start of the backward to their last use
- gradients: to the end of their segment, where they are reduced
- what the backward returns: to the end of the step
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy
from torch import fx

from passes.graph import Bytes, alias_root, is_memory, nbytes
from passes.segments import Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class Live:
    """Non-model bytes around one moment.

    Attributes:
        held: bytes that stay alive throughout.
        own: estimated peak of the rest, node by node: what the segment allocates, and its inputs
            until their last use inside it.
        dying: the inputs that are freed inside, by position in ``Segment.inputs``, with bytes.
    """

    held: int
    own: int
    dying: tuple[tuple[int, int], ...]

    @property
    def peak(self) -> int:
        """Estimated peak bytes."""
        return self.held + self.own


def evaluate(size: Bytes, symbols: Mapping[sympy.Symbol, int]) -> int:
    """A byte count for given symbolic sizes.

    Raises:
        ValueError: if a symbol has no value: a size that depends on data.
    """
    if isinstance(size, int):
        return size
    value = sympy.sympify(size.xreplace(dict(symbols)))
    if not value.is_number:
        raise ValueError(
            f"the size {size} depends on the data of the step, so memory cannot be planned; "
            f"compute such sizes outside the compiled model"
        )
    return int(value)


def liveness(
    forward: Sequence[Segment],
    backward: Sequence[Segment],
    forward_graph: fx.Graph,
    backward_graph: fx.Graph | None,
    *,
    saved: Mapping[fx.Node, fx.Node],
    symbols: Mapping[sympy.Symbol, int],
) -> tuple[Live, ...]:
    """Non-model bytes for each moment, forward first.

    Args:
        forward: the forward's segments.
        backward: the backward's; empty for inference.
        forward_graph: the graph of ``forward``.
        backward_graph: the graph of ``backward``.
        saved: backward placeholder -> the forward output it receives.
        symbols: the value of each symbolic size.
    """
    storages = _Storages(symbols)
    moments = (*forward, *backward)
    end = len(moments)
    for moment, segment in enumerate(moments):
        for node in segment.nodes:
            storages.born(node, moment)
    _inputs(storages, forward_graph)
    if backward_graph is not None:
        for node in backward_graph.find_nodes(op="placeholder"):
            if node in saved:
                storages.alias(node, saved[node])
            elif not _is_anchor(node):
                storages.born(node, len(forward))
                storages.starts_alive.add(storages.root(node))
    for moment, segment in enumerate(moments):
        for node in segment.nodes:
            for source in node.all_input_nodes:
                storages.used(source, moment)
        for _, value in segment.gradients:
            storages.leaves(value, moment)
    _outputs(storages, forward_graph, set(saved.values()), end)
    if backward_graph is not None:
        _outputs(storages, backward_graph, set(), end)
    return tuple(
        _live(storages, segment, moment, entering)
        for (moment, segment), entering in zip(
            enumerate(moments), storages.entering(end), strict=True
        )
    )


class _Storages:
    """Birth and last use of every storage, by moment."""

    def __init__(self, symbols: Mapping[sympy.Symbol, int]) -> None:
        self._symbols = symbols
        self._sizes: dict[Bytes, int] = {}
        self._roots: dict[fx.Node, fx.Node] = {}
        self._aliases: dict[fx.Node, fx.Node] = {}
        self.birth: dict[fx.Node, int] = {}
        self.last_use: dict[fx.Node, int] = {}
        # Storages that outlive the segment of their last use: outputs, gradients.
        self.kept_until: dict[fx.Node, int] = {}
        self.nbytes: dict[fx.Node, int] = {}
        # An op with several results makes all of them at once; each is a storage of its own from
        # then on. The op's node keeps only the results that nobody takes.
        self.parts: dict[fx.Node, list[fx.Node]] = {}
        self.whole_step = 0
        self.starts_alive: set[fx.Node] = set()

    def root(self, node: fx.Node) -> fx.Node:
        found = self._roots.get(node)
        if found is None:
            found = alias_root(node)
            if found in self._aliases:
                found = self._aliases[found]
            self._roots[node] = found
        return found

    def alias(self, node: fx.Node, other: fx.Node) -> None:
        self._aliases[node] = self.root(other)

    def size(self, node: fx.Node) -> int:
        size = nbytes(node)
        if size not in self._sizes:
            self._sizes[size] = evaluate(size, self._symbols)
        return self._sizes[size]

    def born(self, node: fx.Node, moment: int) -> None:
        root = self.root(node)
        if root is node:
            self.birth[root] = moment
            self.last_use[root] = moment
            self.nbytes[root] = self.size(root)
            whole = root.args[0] if root.target is operator.getitem else None
            if isinstance(whole, fx.Node) and whole in self.birth:
                self.birth[root] = self.birth[whole]
                self.nbytes[whole] -= self.nbytes[root]
                self.parts.setdefault(whole, []).append(root)

    def used(self, node: fx.Node, moment: int) -> None:
        root = self.root(node)
        if root in self.birth:
            self.last_use[root] = max(self.last_use[root], moment)

    def leaves(self, node: fx.Node, moment: int) -> None:
        root = self.root(node)
        if root in self.birth:
            self.kept_until[root] = max(self.kept_until.get(root, 0), moment)

    def entering(self, end: int) -> list[list[fx.Node]]:
        """For each moment the storages that are alive when it begins."""
        found: list[list[fx.Node]] = [[] for _ in range(end)]
        for root, born in self.birth.items():
            last = max(self.last_use[root], min(self.kept_until.get(root, 0), end - 1))
            first = born if root in self.starts_alive else born + 1
            for moment in range(first, last + 1):
                found[moment].append(root)
        return found


def _is_anchor(node: fx.Node) -> bool:
    # A reduce takes the gradient first; an input that is a gradient is no anchor.
    return bool(node.users) and all(
        is_memory(user, "fetch") or (is_memory(user, "reduce") and user.args[0] is not node)
        for user in node.users
    )


def _inputs(storages: _Storages, graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr") and not _is_anchor(node):
            storages.whole_step += storages.size(node)


def _outputs(storages: _Storages, graph: fx.Graph, saved: set[fx.Node], end: int) -> None:
    for node in graph.output_node().all_input_nodes:
        if node not in saved:
            storages.leaves(node, end)


def _live(storages: _Storages, segment: Segment, moment: int, entering: Sequence[fx.Node]) -> Live:
    position = {storages.root(n): i for i, n in reversed(list(enumerate(segment.inputs)))}
    held = storages.whole_step
    dying: list[tuple[int, int]] = []
    current = 0
    for root in entering:
        kept = storages.kept_until.get(root, -1) >= moment
        if storages.last_use[root] > moment or kept or root not in position:
            held += storages.nbytes[root]
        else:
            dying.append((position[root], storages.nbytes[root]))
            current += storages.nbytes[root]
    last: dict[fx.Node, int] = {}
    for index, node in enumerate(segment.nodes):
        last[storages.root(node)] = index
        for source in node.all_input_nodes:
            last[storages.root(source)] = index
    freed: dict[int, list[fx.Node]] = {}
    for root, index in last.items():
        kept = storages.kept_until.get(root, -1) >= moment
        if root in storages.birth and storages.last_use[root] <= moment and not kept:
            freed.setdefault(index, []).append(root)
    peak = current
    for index, node in enumerate(segment.nodes):
        born = storages.birth.get(node) == moment and node.target is not operator.getitem
        if born and node not in storages.starts_alive:
            parts = (node, *storages.parts.get(node, ()))
            current += sum(storages.nbytes[part] for part in parts)
            peak = max(peak, current)
        current -= sum(storages.nbytes[root] for root in freed.get(index, ()))
    return Live(held=held, own=peak, dying=tuple(dying))
