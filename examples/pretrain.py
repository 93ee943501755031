"""Pretrain a byte model on the standard library's sources with parameters that do not fit."""

import sysconfig
from pathlib import Path

import torch
from torch import nn

import pstar_compile as pstar

device = "cuda" if torch.cuda.is_available() else "cpu"
files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
text = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)

width, context = 1024, 16
blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)) for _ in range(12)]
model = nn.Sequential(
    nn.Embedding(256, width // context), nn.Flatten(), *blocks, nn.Linear(width, 256)
)
nbytes = sum(p.nbytes for p in model.parameters())

pstar.manage(model, device=device, arena_memory=nbytes // 3)  # a third of what the weights need
compiled = torch.compile(model, backend="patrickstar")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

for step in range(50):
    starts = torch.randint(len(text) - context, (256, 1))
    window = text[starts + torch.arange(context + 1)].long().to(device)
    loss = nn.functional.cross_entropy(compiled(window[:, :-1]), window[:, -1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9:
        print(f"step {step + 1}: loss {loss.item():.3f}")

print(pstar.last_plan(compiled))
print(pstar.stats(model))
