"""Every private torch API the package uses, in one place.

Each function names what it leans on. Checked by the test suite on torch 2.13.0 (CPU) and
2.11.0 (CUDA 13); 2.14.1 was compared by reading its sources.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx, nn

log = logging.getLogger(__name__)

BoxedCallable = Callable[[list[Any]], Any]
Function = TypeVar("Function", bound=Callable[..., Any])


def without_dynamo(function: Function) -> Function:
    """Keep Dynamo out of a function that runs between the pieces of a compiled graph.

    Public (``torch.compiler.disable``), but without type annotations.
    """
    return cast(Function, torch.compiler.disable(function))


def aot_compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    forward: Callable[..., BoxedCallable],
    backward: Callable[..., BoxedCallable],
    inference: Callable[..., BoxedCallable],
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> Callable[..., Any]:
    """Run AOTAutograd on a Dynamo graph. Private: ``torch._dynamo.backends.common``."""
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=dict(decompositions),
    )(gm, example_inputs)


def min_cut_partition(
    joint: fx.GraphModule, inputs: Any, *, saved_fraction: float, **kwargs: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph, saving few bytes; ``saved_fraction`` as in :func:`saved_fraction`.

    Private: ``torch._functorch.partitioners``.
    """
    import torch._functorch.config as config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with config.patch(activation_memory_budget=saved_fraction):
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)


def saved_fraction() -> float:
    """The fraction of the activations saved by default that the partitioner may save, as the user
    has set it. Private: ``torch._functorch.config.activation_memory_budget``.
    """
    import torch._functorch.config as config

    return float(config.activation_memory_budget)


def inductor_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Inductor's decompositions. Private: ``torch._inductor.decomposition``."""
    from torch._inductor.decomposition import select_decomp_table

    return cast(Mapping[Any, Callable[..., Any]], select_decomp_table())


def inductor_joint_passes(gm: fx.GraphModule) -> fx.GraphModule:
    """Inductor's pattern rewrites before partitioning. Private: ``torch._inductor.compile_fx``."""
    import inspect

    from torch._inductor.compile_fx import _recursive_joint_graph_passes

    kwargs: dict[str, Any] = {}
    if "input_device" in inspect.signature(_recursive_joint_graph_passes).parameters:
        values = (node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder"))
        kwargs["input_device"] = next(
            (value.device for value in values if isinstance(value, Tensor)), None
        )
    return _recursive_joint_graph_passes(gm, **kwargs) or gm


def inductor_compile(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[Any, str]:
    """Compile one flat ATen graph; returns the boxed callable and the generated wrapper's source.

    Private: ``torch._inductor.compile_fx.compile_fx_inner``, ``torch._guards.TracingContext``.
    Every output keeps the strides of its FakeTensor, so that segments can be compiled in any order.
    """
    from torch._guards import TracingContext
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    output = gm.graph.output_node()
    output.meta["user_visible_output_idxs"] = [
        i
        for i, value in enumerate(cast(Sequence[Any], output.args[0]))
        if isinstance(value, fx.Node)
    ]
    context = TracingContext.try_get()
    strides = None if context is None else context.output_strides
    if context is not None:
        # compile_fx_inner asserts that nobody reported strides before it in this trace.
        context.output_strides = None
    try:
        compiled = compile_fx_inner(
            gm, example_inputs, static_input_idxs=(), cudagraphs=BoxedBool(False)
        )
    finally:
        if context is not None:
            context.output_strides = strides
    return compiled, str(getattr(compiled, "source_code", ""))


def wake_compile_workers() -> None:
    """Start Inductor's compile workers, so that they are there when the first kernel needs them:
    until then kernels are compiled in this process. Private: ``torch._inductor.async_compile``.
    """
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.wakeup()


@contextmanager
def kernels_together() -> Iterator[None]:
    """Let the kernels of all graphs compiled inside build in parallel; wait for them at the end.

    Each compiled graph's module waits for its own kernels when it is loaded, so that one graph
    after another would leave most of Inductor's compile workers idle.
    Private: ``torch._inductor.async_compile.AsyncCompile.wait``, which those modules call.
    """
    from torch._inductor.async_compile import AsyncCompile

    wait = AsyncCompile.wait
    modules: list[tuple[AsyncCompile, dict[str, Any]]] = []

    def later(self: AsyncCompile, scope: dict[str, Any]) -> None:
        modules.append((self, scope))

    AsyncCompile.wait = later  # type: ignore[method-assign]
    try:
        yield
    finally:
        AsyncCompile.wait = wait  # type: ignore[method-assign]
    for compiler, scope in modules:
        compiler.wait(scope)


def run_boxed(gm: fx.GraphModule) -> BoxedCallable:
    """Make a graph take its inputs in one list, which it empties, so that each value is freed at
    its last use. Private: ``torch.fx.graph._BoxedCodeGen``.
    """
    from torch.fx.graph import _BoxedCodeGen

    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    return mark_boxed(gm.forward)


def mark_boxed(function: Callable[[list[Any]], Any]) -> BoxedCallable:
    """Tell AOTAutograd that ``function`` takes one list. Private: the ``_boxed_call`` mark."""

    def boxed(args: list[Any]) -> Any:
        return function(args)

    cast(Any, boxed)._boxed_call = True
    return boxed


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call back once the running backward is complete, before ``backward()`` returns.

    Private: ``torch.autograd.Variable._execution_engine.queue_callback`` (FSDP2 relies on it).
    """
    cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(callback)


def backward_id() -> int:
    """Which backward is running on this thread; -1 outside. Private: ``torch._C``."""
    return int(torch._C._current_graph_task_id())


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether anybody is told of this parameter's gradients. Private: where the hooks are kept."""
    return bool(
        parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    )


def apply_gradient_hooks(parameter: nn.Parameter, grad: Tensor) -> Tensor:
    """Run ``parameter.register_hook`` hooks on a gradient that autograd did not deliver itself.

    Private: ``Tensor._backward_hooks``.
    """
    for hook in list((parameter._backward_hooks or {}).values()):
        replaced = hook(grad)
        grad = grad if replaced is None else replaced
    return grad


def run_post_accumulate_hooks(parameter: nn.Parameter) -> None:
    """Run the hooks behind accumulation. Private: ``_post_accumulate_grad_hooks``."""
    for hook in list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(parameter)


def storage_is_alive(reference: object) -> bool:
    """Whether any tensor still uses a storage. Private: ``torch.multiprocessing.reductions``."""
    return not cast(Any, reference).expired()


def weak_storage(tensor: Tensor) -> object:
    """A weak reference to a tensor's storage, see :func:`storage_is_alive`."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())


def mark_recompute(node: fx.Node, graph_id: int) -> None:
    """Make the min-cut partitioner recompute ``node`` in the backward instead of saving it.

    Private: the ``recompute`` and ``ac_graph_id`` metadata of activation checkpointing.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = graph_id


def mark_save(node: fx.Node) -> None:
    """Make the min-cut partitioner save ``node`` where the backward needs it. Private: as
    :func:`mark_recompute`.
    """
    from torch.utils.checkpoint import CheckpointPolicy

    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def checkpoint_region(node: fx.Node) -> int | None:
    """The activation-checkpointing region a node belongs to. Private: ``ac_graph_id`` metadata."""
    region = node.meta.get("ac_graph_id")
    return None if region is None else int(region)


def checkpointed_bodies(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """The bodies of the checkpointed regions in a Dynamo graph, nested ones included.

    Private: the higher-order op that Dynamo makes of ``torch.utils.checkpoint``.
    """
    from torch._higher_order_ops.wrap import tag_activation_checkpoint

    found: dict[fx.GraphModule, None] = {}
    for node in gm.graph.find_nodes(op="call_function", target=tag_activation_checkpoint):
        body = gm.get_submodule(str(node.args[0].target))
        assert isinstance(body, fx.GraphModule)
        found |= dict.fromkeys((body, *checkpointed_bodies(body)))
    return list(found)


def copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy second tensors into first ones, in few kernels. Private: ``_foreach_copy_``."""
    if pairs:
        torch._foreach_copy_([pair[0] for pair in pairs], [pair[1] for pair in pairs])


def input_position(placeholder: fx.Node) -> int | None:
    """Which input of the Dynamo graph an AOTAutograd placeholder is; None: it is none of them.

    Private: the ``desc`` metadata, ``torch._functorch._aot_autograd.descriptors``.
    """
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    descriptor = placeholder.meta.get("desc")
    return descriptor.idx if isinstance(descriptor, PlainAOTInput) else None


def without_torch_function(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call a function of PyTorch on a Tensor subclass as if it had no ``__torch_function__``.

    Private: ``torch._C.DisableTorchFunctionSubclass``, which PyTorch's notes on extending it use.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)
