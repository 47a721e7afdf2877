"""Small models whose lines say how they break the graph; `test_explain` reads them.

``# break: KIND`` marks a line; ``hidden`` = it shows up only once others are fixed,
``captured`` = a full-graph build captures it.
"""

# ruff: noqa: T201

import bisect
import logging
import time
import warnings
import zlib

import torch
from torch import nn

logger = logging.getLogger(__name__)


class Clean(nn.Module):
    """One graph."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x):
        return self.layers(x) + 1


class Printing(nn.Module):
    def forward(self, x):
        x = x + 1
        print("between", x.shape)  # break: print
        return x * 2


class Logging(nn.Module):
    def forward(self, x):
        x = x + 1
        logger.info("between")  # break: logging
        x = x * 2
        logging.warning("root")  # break: logging
        return x * 2


class Warning_(nn.Module):
    def forward(self, x):
        x = x + 1
        warnings.warn("between", stacklevel=1)  # break: logging
        return x * 2


class Branch(nn.Module):
    def forward(self, x):
        if x.sum() > 0:  # break: branch
            return x + 1
        return x - 1


class Loop(nn.Module):
    def forward(self, x):
        x = x + 1
        while x.sum() < 10:  # break: branch
            x = x + 1
        return x


class Item(nn.Module):
    def forward(self, x):
        scale = x.sum().item()  # break: item captured
        return x * scale


class Conversion(nn.Module):
    def forward(self, x):
        return x * float(x.sum())  # break: item captured


class ToList(nn.Module):
    def forward(self, x):
        first = x.tolist()[0][0]  # break: item
        return x * first


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(8, 8)

    def forward(self, x):
        x = x + 1
        return self.layer(x)[0]  # break: recurrent captured


class Nonzero(nn.Module):
    def forward(self, x):
        x = x + 1
        found = x.nonzero()  # break: size captured
        return found.sum() + x.sum()


class Mask(nn.Module):
    def forward(self, x):
        return (x + 1)[x > 0].sum()  # break: size captured


class Extension(nn.Module):
    """zlib and bisect stand for C extensions: Dynamo sees no Python code."""

    def forward(self, x):
        x = x + 1
        crc = zlib.crc32(b"abc")  # break: c_extension
        x = x * (crc % 7)
        return x + bisect.bisect_left([1, 2], x.shape[0])  # break: c_extension


class Clock(nn.Module):
    def forward(self, x):
        x = x + 1
        begun = time.time()  # break: c_extension
        return x + begun


class TryExcept(nn.Module):
    def forward(self, x):
        x = x + 1
        try:
            x = x * 2
            print("inside")  # break: print
            x = x * 3
        except ValueError:
            x = x - 1
        return x


class Guarded(nn.Module):
    """An exception that is raised and caught in one function is captured."""

    def forward(self, x):
        try:
            if x.shape[0] != 3:
                raise ValueError("batch")
        except ValueError:
            x = x + 1
        return x * 2


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class CustomAutograd(nn.Module):
    """An ordinary autograd.Function is captured; training inside forward isn't."""

    def forward(self, x):
        x = Double.apply(x)
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()  # break: autograd
            loss = (leaf * 2).sum()
            loss.backward()  # break: autograd
        return leaf.grad + x


@torch.compiler.disable
def disabled(x):
    return x + 1


class Disabled(nn.Module):
    def forward(self, x):
        x = x * 2
        x = disabled(x)  # break: disabled
        return x * 3


class Explicit(nn.Module):
    def forward(self, x):
        x = x * 2
        torch._dynamo.graph_break()  # break: explicit
        return x * 3


class File(nn.Module):
    def forward(self, x):
        x = x * 2
        with open("/dev/null") as file:  # break: builtin
            x = x + len(file.read())
        return x


class Two(nn.Module):
    """Two breaks, one after the other."""

    def forward(self, x):
        x = x + 1
        print("first")  # break: print
        x = x * 2
        if x.sum() > 0:  # break: branch
            x = x + 1
        return x


class Inner(nn.Module):
    def forward(self, x):
        x = x + 1
        print("inner")  # break: print
        return x * 2


class Nested(nn.Module):
    """The break is two calls deep, in a loop over layers; more come behind it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(Inner()), nn.Sequential(Inner())])

    def forward(self, x):
        x = x * 2
        for layer in self.layers:
            x = layer(x)
            logger.warning("layer")  # break: logging hidden
            if x.sum() > 0:  # break: branch hidden
                x = x + 1
        try:
            scale = x.max().item()  # break: item hidden captured
        except ValueError:
            scale = 1
        return x * scale


class Endless(nn.Module):
    """Ends only when a tensor's value changes, which a fake one's never does."""

    def forward(self, x):
        while True:
            x = x + 1
            if x.sum() > 100:  # break: branch
                break
        return x


class Numbers(nn.Module):
    """Needs values between the graphs: fake tensors stop here, random ones don't."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        x = self.layer(x)
        numbers = memoryview(x.numpy(force=True))  # break: builtin
        data = zlib.compress(numbers.tobytes())  # break: c_extension
        x = x + len(data)
        print("behind")  # break: print
        return x


class Failing(nn.Module):
    def forward(self, x):
        x = x + 1
        print("before")  # break: print
        raise RuntimeError("broken model")


class Steps(nn.Module):
    """A Python value per layer: one more compile for each."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Step(index) for index in range(12))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Step(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index = index

    def forward(self, x):
        x = x * self.index
        print("step")  # break: print
        return x + self.index


class Huge(nn.Module):
    """1 TB of parameters."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 1 << 35)
        self.down = nn.Parameter(torch.empty(1 << 35))

    def forward(self, x):
        x = self.up(x)
        x = x * self.down
        print("between")  # break: print
        return x.sum()


class Methods(nn.Module):
    def encode(self, x):
        x = x + 1
        print("encode")  # break: print
        return x * 2


class FixedPrint(nn.Module):
    """As the report advises: nothing is printed while the graph is captured."""

    def forward(self, x):
        x = x + 1
        if not torch.compiler.is_compiling():
            print("between")
            logger.warning("between")
        return x * 2


class FixedBranch(nn.Module):
    def forward(self, x):
        return torch.where(x.sum() > 0, x + 1, x - 1)


class FixedCond(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


class FixedSize(nn.Module):
    def forward(self, x):
        x = x + 1
        found = torch.nonzero_static(x, size=4)
        return torch.where(x > 0, x, 0).sum() + found.sum()


@torch.library.custom_op("compilekit_tests::compressed", mutates_args=())
def compressed(x: torch.Tensor) -> torch.Tensor:
    """How small zlib makes the numbers."""
    return torch.tensor(len(zlib.compress(memoryview(x.numpy()).tobytes())))


@compressed.register_fake
def _(x):
    return torch.empty((), dtype=torch.int64)


class FixedExtension(nn.Module):
    def forward(self, x):
        x = x + 1
        return x + compressed(x)


class FixedAutograd(nn.Module):
    def forward(self, x):
        if torch.is_grad_enabled():
            leaf = x.detach().requires_grad_()
            (leaf * 2).sum().backward()
            return leaf.grad + x
        return x * 2
