"""A small GPT, training loops on seeded data, and bitwise comparison with the plain module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pstar_compile as pstar
from passes.plan import Home
from pstar_compile.managed import engine_of

VOCABULARY = 96
WIDTH = 32
LENGTH = 12


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (
            t.view(shape).transpose(1, 2) for t in self.qkv(self.norm1(x)).split(width, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT whose head is tied to its embedding."""

    def __init__(self, layers: int = 4, *, checkpointed: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.checkpointed = checkpointed
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


class MLP(nn.Module):
    """Linear layers with a buffer that each forward changes."""

    def __init__(self, layers: int = 4, width: int = WIDTH, *, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def blocks_of(model: GPT) -> list[nn.Module]:
    """The blocks of a GPT."""
    return list(model.blocks)


def tokens(step: int, batch: int = 2, length: int = LENGTH) -> Tensor:
    """The token ids of a step: inputs and targets in one."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, VOCABULARY, (batch, length + 1), generator=generator)


def rows(step: int, batch: int = 4, width: int = WIDTH) -> Tensor:
    """The real-valued inputs of a step."""
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(2000 + step))


def next_token_loss(run: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    """Cross entropy of each next token."""
    return F.cross_entropy(run(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that most tests use."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


@dataclass(kw_only=True)
class Recorder:
    """Everything a loop must leave equal: copies taken step by step, and at its end."""

    model: nn.Module
    log: list[Any] = field(default_factory=list)

    def keep(self, *values: Any) -> None:
        """Remember values as they are now, together with every gradient."""
        self.log.append((copy_of(values), gradients(self.model)))


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of all gradients, by parameter name."""
    return {n: copy_of(p.grad) for n, p in model.named_parameters()}


def state_of(model: nn.Module) -> dict[str, Any]:
    """Copies of parameters, buffers and gradients."""
    return {
        "parameters": {n: copy_of(p.detach()) for n, p in model.named_parameters()},
        "buffers": {n: copy_of(b) for n, b in model.named_buffers()},
        "gradients": gradients(model),
    }


def copy_of(value: Any) -> Any:
    """A deep copy whose tensors are detached."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {k: copy_of(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [copy_of(v) for v in value]
    return copy.deepcopy(value)


def assert_same(actual: Any, expected: Any, where: str = "result") -> None:
    """Equal in structure, and every tensor bit for bit."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), f"{where}: {actual!r}, not a tensor"
        assert actual.dtype == expected.dtype, f"{where}: {actual.dtype}, not {expected.dtype}"
        assert actual.shape == expected.shape, f"{where}: {actual.shape}, not {expected.shape}"
        same = torch.equal(_bits(actual), _bits(expected))
        distance = "" if same else f"by up to {(actual - expected).abs().max().item():.3g}"
        assert same, f"{where} differs {distance}"
    elif isinstance(expected, Mapping):
        assert list(actual) == list(expected), f"{where}: keys {list(actual)}"
        for key, value in expected.items():
            assert_same(actual[key], value, f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), f"{where}: {len(actual)} items, not {len(expected)}"
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    else:
        assert actual == expected, f"{where}: {actual!r}, not {expected!r}"


def _bits(tensor: Tensor) -> Tensor:
    """NaN equals NaN, and 0.0 differs from -0.0."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


Loop = Callable[[Any, Any, Recorder], Any]
"""Takes what to call, the module behind it, and a recorder; returns optimizers (or None)."""


def managed(
    model: nn.Module,
    *,
    arena: int | str | None = "64KiB",
    param_dtype: torch.dtype | None = None,
    dynamic: bool | None = None,
    pieces: Callable[[Any], Sequence[nn.Module]] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """What to call, and the managed module behind it, paged through a small arena.

    The whole model is compiled, or only the ``pieces`` of it, each on its own.
    """
    pstar.manage(model, device="cpu", arena_memory=arena, param_dtype=param_dtype)
    settings: Any = {
        "backend": "patrickstar",
        "dynamic": dynamic,
        "options": {"inner": "eager", **options},
    }
    if pieces is None:
        return torch.compile(model, **settings), model
    for piece in pieces(model):
        piece.compile(**settings)
    return model, model


def record(loop: Loop, run: Any, model: nn.Module) -> dict[str, Any]:
    """Run a loop and return all that it left behind."""
    recorder = Recorder(model=model)
    optimizers = loop(run, model, recorder)
    if isinstance(optimizers, torch.optim.Optimizer):
        optimizers = [optimizers]
    return {
        "log": recorder.log,
        **state_of(model),
        "optimizers": [copy_of(o.state_dict()) for o in optimizers or ()],
    }


def assert_trains_like_eager(
    build: Callable[[], nn.Module], loop: Loop, *, paged: bool = True, **settings: Any
) -> tuple[Any, Any]:
    """Run a loop on the plain module and on the managed one; everything must be equal.

    Args:
        build: makes the model, the same one each time.
        loop: what to run.
        paged: check that the parameters do live on the host, so that the test means something.
        settings: see :func:`managed`.

    Returns:
        The compiled and the managed model, for further checks.
    """
    plain = build()
    expected = record(loop, plain, plain)
    torch._dynamo.reset()
    compiled, model = managed(build(), **settings)
    actual = record(loop, compiled, model)
    assert_same(actual, expected)
    if paged:
        assert engine_of(model).homes == {Home.HOST}
    assert_at_rest(model)
    return compiled, model


def assert_at_rest(model: nn.Module) -> None:
    """Nothing is left over between steps: no running step, no turn, no pending gradient."""
    engine = engine_of(model)
    assert not engine.running
    assert engine.turn is None, "a forward still waits for its backward"
    assert not engine.gradients._pending, "gradients were reduced but not delivered"
    assert (
        engine.on_demand.resident_bytes == 0
        or engine.config.arena_memory is None
        or (engine.on_demand.resident_bytes <= engine.config.arena_memory)
    )


def steps(count: int, *, make_optimizer: Callable[..., Any] = adamw, start: int = 0) -> Loop:
    """A plain training loop over next tokens."""

    def loop(run: Any, model: nn.Module, recorder: Recorder) -> Sequence[Any]:
        optimizer = make_optimizer(model)
        for step in range(start, start + count):
            loss = next_token_loss(run, tokens(step))
            loss.backward()
            recorder.keep(loss)
            optimizer.step()
            optimizer.zero_grad()
        return [optimizer]

    return loop
