"""A small convolutional network with batch norm and augmentation, on images made here.

python image_classifier.py
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hpc_ckpt import Checkpointer

EPOCHS = 6


class Shapes(Dataset[tuple[Tensor, Tensor]]):
    """Bars, crosses and squares in noise; each is shifted and mirrored when it is read."""

    def __init__(self, count: int, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 3, (count,), generator=made)
        self.images = 0.3 * torch.randn(count, 1, 20, 20, generator=made)
        for image, label in zip(self.images, self.labels.tolist(), strict=True):
            if label in (0, 1):
                image[0, 9:11, 4:16] += 1
            if label == 1:
                image[0, 4:16, 9:11] += 1
            if label == 2:
                image[0, 6:14, 6:14] += 1

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        down, right = torch.randint(-3, 4, (2,)).tolist()
        image = self.images[index].roll((down, right), (1, 2))
        return (image.flip(2) if torch.rand(()) < 0.5 else image), self.labels[index]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(32, 3),
    )  # fmt: skip


@torch.no_grad()
def accuracy(model: nn.Module, loader: Iterable[tuple[Tensor, Tensor]]) -> float:
    model.eval()
    right = [(model(images).argmax(1) == labels).float().mean() for images, labels in loader]
    model.train()
    return torch.stack(right).mean().item()


def digest(model: nn.Module) -> str:
    data = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    return hashlib.sha256(data).hexdigest()[:16]


def main() -> None:
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[3, 5], gamma=0.3)
    training = DataLoader(Shapes(1200, seed=1), batch_size=32, shuffle=True, num_workers=2)
    held_back = DataLoader(Shapes(300, seed=2), batch_size=100)
    with Checkpointer("runs/images", model=model, optimizer=optimizer, scheduler=scheduler) as ckpt:
        for epoch in ckpt.epochs(EPOCHS):
            for images, labels in ckpt.batches(training):
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                ckpt.step(loss=loss)
            scheduler.step()
            right = accuracy(model, ckpt.batches(held_back, track=False))
            print(f"epoch {epoch}: accuracy {right:.3f}", flush=True)
    print(f"weights {digest(model)}")


if __name__ == "__main__":
    main()
