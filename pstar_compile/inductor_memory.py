"""Peak memory of code that Inductor generated, read from its wrapper.

The wrapper is Python that allocates every buffer by name and deletes it after its last use, so its
own allocations can be replayed without running it. Decomposed graphs cannot tell: Inductor never
materialises most of their values.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """One step of the replay: ``name`` comes to life with ``nbytes``, or dies.

    ``alias`` names the value whose storage ``name`` shares. Inputs are named by their position.
    """

    kind: Literal["alloc", "alias", "free"]
    name: str
    nbytes: int = 0
    alias: str = ""


def memory_events(source: str) -> tuple[MemoryEvent, ...] | None:
    """The allocations and frees of a wrapper's ``call``, in order.

    Inputs are renamed ``input0``, ``input1``, ... Returns None if the source is not understood
    (symbolic sizes, C++ wrappers): callers then fall back to their estimate.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "call":
            try:
                return tuple(_Reader().read(node))
            except _NotUnderstoodError:
                return None
    return None


def peak_bytes(events: Sequence[MemoryEvent], inputs: Mapping[int, int]) -> int:
    """Largest sum of live bytes during a replay.

    Args:
        events: see :func:`memory_events`.
        inputs: bytes of the inputs that nobody else holds, by position: they count until they
            are freed. Other inputs are not counted.
    """
    storage_of: dict[str, str] = {}
    names: dict[str, int] = {}
    size: dict[str, int] = {}
    live = 0
    for position, nbytes in inputs.items():
        name = f"input{position}"
        storage_of[name], names[name], size[name] = name, 1, nbytes
        live += nbytes
    peak = live
    for event in events:
        if event.kind == "free":
            storage = storage_of.pop(event.name, None)
            if storage is not None:
                names[storage] -= 1
                live -= size[storage] if names[storage] == 0 else 0
            continue
        storage = event.name
        if event.kind == "alias":
            if event.alias not in storage_of:
                continue
            storage = storage_of[event.alias]
            names[storage] += 1
        else:
            names[storage], size[storage] = 1, event.nbytes
            live += event.nbytes
        storage_of[event.name] = storage
        peak = max(peak, live)
    return peak


class _NotUnderstoodError(Exception):
    pass


class _Reader:
    def __init__(self) -> None:
        self._inputs: dict[str, str] = {}
        self._events: list[MemoryEvent] = []
        # Results of fallback kernels: their size follows in an assert_size_stride.
        self._unsized: set[str] = set()
        self._itemsize = 4

    def read(self, function: ast.FunctionDef) -> list[MemoryEvent]:
        for statement in _flatten(function.body):
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                self._assign(statement.targets[0], statement.value)
            elif isinstance(statement, ast.Delete):
                for target in statement.targets:
                    if isinstance(target, ast.Name):
                        self._add(MemoryEvent("free", self._name(target.id)))
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                self._size(statement.value)
        return self._events

    def _add(self, event: MemoryEvent) -> None:
        self._events.append(event)

    def _name(self, name: str) -> str:
        return self._inputs.get(name, name)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(value, ast.Name) and value.id == "args":
            elements = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
            for position, element in enumerate(elements):
                if isinstance(element, ast.Name):
                    self._inputs[element.id] = f"input{position}"
            return
        if not isinstance(target, ast.Name):
            return
        name = self._name(target.id)
        if isinstance(value, ast.Name):
            self._add(MemoryEvent("alias", name, alias=self._name(value.id)))
        elif isinstance(value, ast.Subscript):
            self._unsized.add(name)
        elif isinstance(value, ast.Call):
            function = ast.unparse(value.func)
            first = value.args[0] if value.args else None
            if function.startswith("empty_strided"):
                self._add(MemoryEvent("alloc", name, self._strided_bytes(value)))
            elif function.endswith("reinterpret_tensor") and isinstance(first, ast.Name):
                self._add(MemoryEvent("alias", name, alias=self._name(first.id)))
            elif function.startswith(("torch.ops", "aten", "extern_kernels")):
                self._unsized.add(name)

    def _strided_bytes(self, call: ast.Call) -> int:
        size, stride = _ints(call.args[0]), _ints(call.args[1])
        dtype = getattr(torch, ast.unparse(call.args[2]).removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise _NotUnderstoodError
        if dtype.is_floating_point:
            self._itemsize = dtype.itemsize
        if 0 in size:
            return 0
        extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        return extent * dtype.itemsize

    def _size(self, call: ast.Call) -> None:
        if ast.unparse(call.func) != "assert_size_stride" or not isinstance(call.args[0], ast.Name):
            return
        name = self._name(call.args[0].id)
        if name in self._unsized:
            # The wrapper does not tell the dtype: that of the buffers around it is taken.
            self._unsized.remove(name)
            nbytes = math.prod(_ints(call.args[1])) * self._itemsize
            self._add(MemoryEvent("alloc", name, nbytes))


def _flatten(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    statements: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.With | ast.If | ast.Try):
            statements.extend(_flatten(statement.body))
        else:
            statements.append(statement)
    return statements


def _ints(expression: ast.expr) -> tuple[int, ...]:
    try:
        value = ast.literal_eval(expression)
    except ValueError:
        raise _NotUnderstoodError from None
    if not isinstance(value, tuple) or not all(isinstance(n, int) for n in value):
        raise _NotUnderstoodError
    return value
