"""A generator and a discriminator with an optimizer each: points on a ring.

python gan.py
"""

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hpc_ckpt import Checkpointer

EPOCHS = 8
NOISE = 8


def ring(count: int) -> Tensor:
    angles = 2 * math.pi * torch.rand(count)
    radii = 1 + 0.05 * torch.randn(count)
    return torch.stack([radii * angles.cos(), radii * angles.sin()], 1)


def layers(before: int, after: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(before, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2),
        nn.Linear(64, after),
    )  # fmt: skip


def digest(*models: nn.Module) -> str:
    values = (value for model in models for value in model.state_dict().values())
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()[:16]


def main() -> None:
    torch.manual_seed(0)
    generator, discriminator = layers(NOISE, 2), layers(2, 1)
    for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    for_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    loader = DataLoader(TensorDataset(ring(4096)), batch_size=64, shuffle=True)
    judge = nn.functional.binary_cross_entropy_with_logits
    tracked = {"generator": generator, "discriminator": discriminator}
    tracked |= {"for_generator": for_generator, "for_discriminator": for_discriminator}
    with Checkpointer("runs/gan", **tracked) as ckpt:
        for epoch in ckpt.epochs(EPOCHS):
            for (real,) in ckpt.batches(loader):
                made = generator(torch.randn(len(real), NOISE))
                of_real, of_made = discriminator(real), discriminator(made.detach())
                loss = judge(of_real, torch.ones_like(of_real)) + judge(
                    of_made, torch.zeros_like(of_made)
                )
                for_discriminator.zero_grad()
                loss.backward()
                for_discriminator.step()

                judged = discriminator(made)
                fooled = judge(judged, torch.ones_like(judged))
                for_generator.zero_grad()
                fooled.backward()
                for_generator.step()
                ckpt.step(loss=loss)
            radius = generator(torch.randn(500, NOISE)).norm(dim=1).mean().item()
            print(f"epoch {epoch}: mean radius {radius:.3f}", flush=True)
    print(f"weights {digest(generator, discriminator)}")


if __name__ == "__main__":
    main()
