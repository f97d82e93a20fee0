"""The parameters of tables on the servers, which hold no rows.

They stand where TorchRec has the weights of its own tables: for names, for state dicts,
and for what walks over ``model.parameters()``. What would change rows of a table of
TorchRec's, and could change nothing here, is an error or a warning.
"""

import inspect
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from persia_torchrec.errors import ConfigError
from persia_torchrec.sharding import torchrec_api

_FILLS = frozenset(
    {
        *("bernoulli_", "cauchy_", "exponential_", "fill_", "geometric_"),
        *("log_normal_", "normal_", "random_", "uniform_", "zero_"),
    }
)


class Placeholder(nn.Parameter):
    """The parameter of one table, ``(0,)``; filling it is a ConfigError.

    Attributes:
        told: called when someone asks for no gradient of it.
    """

    told: Callable[[], None] | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be pickled as a plain parameter, without whom it tells."""
        return nn.Parameter, (self.detach().as_subclass(torch.Tensor), False)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call an operator as for a plain parameter, unless it fills this one."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in _FILLS or _is_init(func, inspect.currentframe()):
            raise ConfigError(
                "Rows of tables on the servers are drawn there, by id, when an id is "
                f"first trained. Received: {name} of a table's parameter, which holds "
                "no rows. Give the table's config init_fn=..., or its TableSettings "
                "initializer=...; write rows by model.load_state_dict or load_weights "
                "of the sharders."
            )
        if func in (_SET_REQUIRES_GRAD, torch.Tensor.requires_grad_):
            wants = (*args[1:2], *kwargs.values(), True)[0]
            told = getattr(args[0], "told", None)
            if not wants and told is not None:
                told()
        result = torchrec_api.call_operator(func, *args, **kwargs)
        return result.as_subclass(cls) if func == _GET_DATA else result


_SET_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


def _is_init(func: Callable[..., Any], called: FrameType | None) -> bool:
    """Return whether a function is of ``torch.nn.init``, or called from there."""
    caller = called.f_back if called is not None else None
    modules = [getattr(func, "__module__", None)]
    modules += [caller.f_globals.get("__name__")] if caller is not None else []
    return nn.init.__name__ in modules
