"""A small GPT over the letters of a text: bfloat16, gradient accumulation, a cosine schedule.

python gpt.py
"""

import hashlib

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hpc_ckpt import Checkpointer

EPOCHS = 4
ACCUMULATE = 2
CONTEXT = 32
TEXT = (
    "People have work that needs days; clusters give hours, preempt, and fail. A chain of short "
    "jobs behaves as one long job that cannot be killed. What was computed once is not computed "
    "again, and every sample is used exactly once in each epoch. "
) * 4


class Letters(Dataset[Tensor]):
    """Every stretch of the text that is one longer than the context."""

    def __init__(self) -> None:
        self.alphabet = sorted(set(TEXT))
        self.codes = torch.tensor([self.alphabet.index(letter) for letter in TEXT])

    def __len__(self) -> int:
        return len(self.codes) - CONTEXT

    def __getitem__(self, index: int) -> Tensor:
        return self.codes[index : index + CONTEXT + 1]


class Gpt(nn.Module):
    def __init__(self, letters: int, width: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(letters, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True),
            layers,
            enable_nested_tensor=False,
        )
        self.head = nn.Linear(width, letters, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, codes: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(codes.shape[1])
        hidden = self.tokens(codes) + self.places.weight[: codes.shape[1]]
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


@torch.no_grad()
def loss_on(model: nn.Module, codes: Tensor) -> Tensor:
    model.eval()
    letters = model(codes[:, :-1])
    model.train()
    return nn.functional.cross_entropy(letters.transpose(1, 2), codes[:, 1:])


def digest(model: nn.Module) -> str:
    data = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    return hashlib.sha256(data).hexdigest()[:16]


def main() -> None:
    torch.manual_seed(0)
    text = Letters()
    loader = DataLoader(text, batch_size=16, shuffle=True, drop_last=True)
    sample = torch.stack([text[number] for number in range(0, 640, 10)])
    model = Gpt(len(text.alphabet))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = EPOCHS * len(loader) // ACCUMULATE
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    with Checkpointer("runs/gpt", model=model, optimizer=optimizer, scheduler=scheduler) as ckpt:
        for epoch in ckpt.epochs(EPOCHS):
            batches = ckpt.batches(loader)
            for number, codes in enumerate(batches, batches.start):
                with torch.autocast("cpu", torch.bfloat16):
                    letters = model(codes[:, :-1])
                    loss = nn.functional.cross_entropy(letters.transpose(1, 2), codes[:, 1:])
                (loss / ACCUMULATE).backward()
                if number % ACCUMULATE == ACCUMULATE - 1:
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                ckpt.step(loss=loss)
            print(f"epoch {epoch}: loss {loss_on(model, sample):.3f}", flush=True)
    print(f"weights {digest(model)}")


if __name__ == "__main__":
    main()
