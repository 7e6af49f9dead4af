"""A whole training in the README's words: ``forty_lines.py URL OUT STEPS``. Killed at any moment, started again."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckpt

url, out, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
data = TensorDataset(torch.randn(200, 32, generator=torch.Generator().manual_seed(1)))
loader = DataLoader(data, batch_size=8, shuffle=True)


@ckpt.checkpointed(url, every=3, keep=ckpt.Keep(last=3))
def train(run: ckpt.Run) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.3), nn.BatchNorm1d(64), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    average = torch.optim.swa_utils.AveragedModel(model)
    losses: list[float] = []
    run.track(model=model, optimizer=optimizer, schedule=schedule, average=average, losses=losses)
    with open(out + ".starts", "a") as starts:
        starts.write(f"{len(run.state['losses'])}\n")
    for _, (x,) in run.batches(loader, steps):
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
        run.state["losses"].append(loss.item())
        run.log(loss=loss)
    final = {**model.state_dict(), **{f"average.{k}": v for k, v in average.state_dict().items()}}
    moments = [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
    tensors = [*final.values(), *moments, torch.tensor(run.state["losses"], dtype=torch.float64)]
    with open(out, "wb") as file:
        file.writelines(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)


train()
