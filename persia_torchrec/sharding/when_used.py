"""An output that is made when it is used, not when the module is called.

TorchRec's modules answer with an awaitable, which waits by itself at the first use. So
what a model does between the call and the use, and the calls of other collections, hide
the pull as well; and a pipeline that calls a module for a later batch, before the
backward pass of this one, never waits for a pull that waits for this backward pass.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import LazyAwaitable, ShardedModule
from torchrec.streamable import Multistreamable

CompOut = TypeVar("CompOut", bound=Multistreamable)
Out = TypeVar("Out", bound=Multistreamable)
Context = TypeVar("Context", bound=Multistreamable)
Function = TypeVar("Function", bound=Callable[..., object])


def not_traced(function: Function) -> Function:
    """Leave a function, and all that it calls, out of what torch.compile traces."""
    untraced: Function = torch.compiler.disable(function)
    return untraced


class WhenUsedModule(ShardedModule[Any, CompOut, Out, Context]):
    """A sharded module whose ``compute`` and ``output_dist`` wait for the first use."""

    def compute_and_output_dist(
        self, ctx: Context, input: KJTList
    ) -> LazyAwaitable[Out]:
        """Return the output before it is there.

        Args:
            ctx: of this batch.
            input: what ``input_dist`` leads to: a list of one started pull.
        """
        (started,) = input
        return when_used(lambda: self._output_of(ctx, started))

    @not_traced
    def _output_of(self, ctx: Context, started: Any) -> Out:
        return self.output_dist(ctx, self.compute(ctx, started)).wait()


def when_used(make: Callable[[], Out]) -> LazyAwaitable[Out]:
    """Return an output to come, or the output where torch.compile traces the call.

    Dynamo cannot break a graph at the first use of an awaitable: it would leave the
    function that uses it, with its dense layers, to Python.
    """
    if torch.compiler.is_dynamo_compiling():
        return Here(make())
    return WhenUsed(make)


class Here(LazyAwaitable[Out]):
    """An output that is already there."""

    def __init__(self, output: Out) -> None:
        super().__init__()
        self._output = output

    def _wait_impl(self) -> Out:
        return self._output


class WhenUsed(LazyAwaitable[Out]):
    """An output to come; made once, with the gradient mode of the call.

    Args:
        make: waits and returns the output.
    """

    def __init__(self, make: Callable[[], Out]) -> None:
        super().__init__()
        self._make: Callable[[], Out] | None = make
        self._has_grad = torch.is_grad_enabled()
        self._output: Out | None = None

    def _wait_impl(self) -> Out:
        # TorchRec remembers what it waited for by itself, but not what wait() returned.
        if self._make is not None:
            with torch.set_grad_enabled(self._has_grad):
                self._output = self._make()
            self._make = None
        assert self._output is not None
        return self._output
