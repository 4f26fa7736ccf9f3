"""An ordinary torch training loop, made collaborative by three lines.

    python examples/torch_loop.py start tcp://127.0.0.1:7700          # in one terminal
    python examples/torch_loop.py join tcp://127.0.0.1:7700           # in another, on this machine or on a second one
"""

import sys

import torch
from torch import nn

from p2pml.protocols.chainsgd.group import Group

torch.set_num_threads(1)  # two peers share this machine, perhaps
role, address = sys.argv[1:3]
rank = {"start": 0, "join": 1}[role]

# Each peer sees one half of a spiral only; together they learn all of it.
generator = torch.Generator().manual_seed(rank)
angle = torch.rand(400, generator=generator) * 6
arm = torch.randint(2, (400,), generator=generator)
angle = angle / 2 + 3 * rank
points = torch.stack([angle * torch.cos(angle + 3.14 * arm), angle * torch.sin(angle + 3.14 * arm)], 1) / 6

torch.manual_seed(rank)
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

# 1. become a member: the model is now the group's
group = Group.start(model, listen=address, peers=2) if role == "start" else Group.join(address, model)

for step in range(600):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(points), arm)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    if step % 5 == 4:
        group.average()  # 2. every five steps, hand over the model and get the group's back

group.leave()  # 3. goodbye

whole = torch.linspace(0.5, 6, 200).repeat(2)
sides = torch.arange(2).repeat_interleave(200)
spiral = torch.stack([whole * torch.cos(whole + 3.14 * sides), whole * torch.sin(whole + 3.14 * sides)], 1) / 6
print(f"accuracy on the whole spiral: {(model(spiral).argmax(1) == sides).float().mean():.3f}")
