"""PyTorch, eager and compiled: training steps of the same models, as workloads of a benchmark."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from peer_workloads import WORKLOADS, batch_of, details_of
from torch import nn
from torch.nn import functional

from keras_mp.bench.workloads import Workload
from keras_mp.system.host import cpu_name

_DTYPES = {"mixed_bfloat16": torch.bfloat16, "mixed_float16": torch.float16}


class Block(nn.Module):
    """A transformer's block, with the normalization before each branch."""

    def __init__(self, width: int, heads: int, epsilon: float, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first, self.second = nn.LayerNorm(width, epsilon), nn.LayerNorm(width, epsilon)
        self.split, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dense = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.split(self.first(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.join(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.dense(self.second(x))


class Gpt(nn.Module):
    """A GPT whose output layer uses the weights of its token embedding."""

    def __init__(self, layer_count: int, width: int, heads: int, vocabulary: int, length: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, 1e-5, True) for _ in range(layer_count)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight
        return functional.linear(self.norm(self.blocks(x)), self.tokens.weight)


class LlamaBlock(nn.Module):
    """A block of models/llama.py: normalization before each branch, grouped queries, SwiGLU, no biases."""

    def __init__(self, width: int, heads: int, key_heads: int, hidden: int):
        super().__init__()
        self.heads, self.key_heads, features = heads, key_heads, width // heads
        self.first, self.second = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.split = nn.Linear(width, (heads + 2 * key_heads) * features, bias=False)
        self.join = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.split(self.first(x)).view(batch, length, -1, width // self.heads).transpose(1, 2)
        query, key, value = parts.split([self.heads, self.key_heads, self.key_heads], 1)
        y = functional.scaled_dot_product_attention(
            _rotated(query, rotation), _rotated(key, rotation), value, is_causal=True, enable_gqa=True
        )
        x = x + self.join(y.transpose(1, 2).reshape(batch, length, width))
        y = self.second(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def _rotated(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Turns the pairs (i, i + features / 2) of each head by their position's angles."""
    cosine, sine = rotation.to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


class Llama(nn.Module):
    """A Llama whose output layer uses the weights of its token embedding."""

    def __init__(self, layers: int, width: int, heads: int, key_heads: int, hidden: int, vocabulary: int, length: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, key_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, 1e-5)
        pairs = width // heads // 2
        angles = torch.outer(torch.arange(length), 500000.0 ** (-torch.arange(pairs) / pairs))
        self.register_buffer("rotation", torch.stack([angles.cos(), angles.sin()]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.rotation)
        return functional.linear(self.norm(x), self.tokens.weight)


class Vit(nn.Module):
    """A vision transformer with a class token."""

    def __init__(self, layer_count: int, width: int, heads: int, classes: int, side: int, patch: int):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads, 1e-6, False) for _ in range(layer_count)))
        self.norm, self.logits = nn.LayerNorm(width, 1e-6), nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1).to(x.dtype), x], 1) + self.positions
        return self.logits(self.norm(self.blocks(x))[:, 0])


class Residual(nn.Module):
    """A residual block of a ResNet: basic, or a bottleneck with the stride in its 3x3 convolution."""

    def __init__(self, inputs: int, filters: int, stride: int, bottleneck: bool):
        super().__init__()
        if bottleneck:
            shapes = [(inputs, filters, 1, 1), (filters, filters, 3, stride), (filters, 4 * filters, 1, 1)]
        else:
            shapes = [(inputs, filters, 3, stride), (filters, filters, 3, 1)]
        parts: list[nn.Module] = []
        for shape in shapes:
            parts += [*_convolution(*shape), nn.ReLU()]
        self.branch = nn.Sequential(*parts[:-1])
        outputs = shapes[-1][1]
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.shortcut(x) + self.branch(x))


def resnet(depth: int, classes: int, side: int) -> nn.Module:
    """The ResNet of models/resnet.py."""
    bottleneck = depth >= 50
    stem = _convolution(3, 64, 3, 1) if side < 64 else [*_convolution(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    parts: list[nn.Module] = [*stem[:2], nn.ReLU(), *stem[2:]]
    inputs = 64
    for stage, count in enumerate({18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}[depth]):
        for index in range(count):
            filters = 64 * 2**stage
            parts.append(Residual(inputs, filters, 2 if stage and not index else 1, bottleneck))
            inputs = filters * (4 if bottleneck else 1)
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def _convolution(inputs: int, filters: int, kernel: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, filters, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(filters)]


def step(workload: str, precision: str, compile: bool = False) -> Workload:
    """A training step with AdamW, under autocast for a lower precision, and with a GradScaler for float16."""
    chosen = WORKLOADS[workload]
    torch.manual_seed(0)
    torch.set_num_threads(os.cpu_count() or 1)
    # TensorFloat-32 is what "float32" means to the other peers on a GPU.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "strict float32"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: Any = {"gpt": Gpt, "llama": Llama, "vit": Vit, "resnet": resnet}[chosen.kind](*chosen.sizes)
    x, y = (torch.from_numpy(array).to(device) for array in batch_of(chosen))
    model = model.to(device)
    if not chosen.reads_text:
        # What its convolutions are fastest in, and what the others have.
        model = model.to(memory_format=torch.channels_last)
        x = x.permute(0, 3, 1, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, weight_decay=0.01, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "mixed_float16")
    targets = y.flatten().long()
    network = torch.compile(model) if compile else model
    dtype = _DTYPES.get(precision)

    def step() -> torch.Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            logits = network(x)
        loss = functional.cross_entropy(logits.float().flatten(0, -2), targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    def run(steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            loss = step()
        loss.item()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name() if cuda else cpu_name()
    details = details_of(chosen) | {
        "backend": "torch",
        "device": name,
        "kind": "gpu" if cuda else "cpu",
        "versions": {"torch": torch.__version__},
    }
    return Workload(run, details, torch.cuda.max_memory_allocated if cuda else None)
