"""An optimizer around another one. One rule: all state is the wrapped one's, so that schedulers,
GradScaler and checkpoints see through."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class Wrapped(Optimizer):
    """Like torch's own PostLocalSGDOptimizer it is an Optimizer for whoever asks, but does not run
    Optimizer.__init__. Hooks belong to the wrapped one too."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults
