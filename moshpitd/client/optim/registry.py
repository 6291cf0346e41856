"""Algorithms by the names that people search for. One rule: the names are those of the papers, in
lower case with dashes, and one name means one class with one set of defaults."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from moshpitd.client.optim.asysg import AsySGCon, AsySGIncon
from moshpitd.client.optim.bagua import CUBE, QAdam
from moshpitd.client.optim.delayed_sgd import DelayedSGD
from moshpitd.client.optim.diana import ADIANA, DIANA, VRDIANA
from moshpitd.client.optim.differences import DCD, ChocoSGD
from moshpitd.client.optim.diloco import DiLoCo, StreamingDiLoCo
from moshpitd.client.optim.distributed import SwarmOptimizer
from moshpitd.client.optim.feedback import ECSGD, ECSGDDiana, EFSignSGD
from moshpitd.client.optim.gossip import ADPSGD, DPSGD, GossipSGD, StochasticGradientPush
from moshpitd.client.optim.marina import MARINA, PPMARINA
from moshpitd.client.optim.mean_gradient import NUQSGD, QSGD
from moshpitd.client.optim.onebit import OneBitAdam, OneBitLamb
from moshpitd.client.optim.powersgd import PowerSGD
from moshpitd.client.optim.target_batch import TargetBatch
from moshpitd.client.optim.zero_one import ZeroOneAdam
from moshpitd.client.session import Session
from moshpitd.client.swarm import SwarmOfDaemons
from moshpitd.errors import ConfigError

FAMILIES: tuple[type[SwarmOptimizer], ...] = (
    DPSGD,
    GossipSGD,
    StochasticGradientPush,
    ADPSGD,
    OneBitAdam,
    ZeroOneAdam,
    OneBitLamb,
    *CUBE.values(),
    QAdam,
    ChocoSGD,
    DCD,
    QSGD,
    NUQSGD,
    EFSignSGD,
    ECSGD,
    ECSGDDiana,
    DIANA,
    VRDIANA,
    ADIANA,
    MARINA,
    PPMARINA,
    AsySGCon,
    AsySGIncon,
    DiLoCo,
    StreamingDiLoCo,
    PowerSGD,
    DelayedSGD,
    TargetBatch,
)
ALGORITHMS: dict[str, type[SwarmOptimizer]] = {kind.algorithm: kind for kind in FAMILIES}


def by_name(name: str, params: Iterable[Any], swarm: object, **options: Any) -> SwarmOptimizer:
    """The optimizer called `name` over `params` (parameters, or param groups).

    `swarm` is whatever offers the primitives that it needs: a session, `SwarmOfDaemons(session)`
    with options of its own, or a peer of `testing.ArithmeticSwarm`. Options are the class's
    keywords; a wrong one is ConfigError.
    """
    swarm = SwarmOfDaemons(swarm) if isinstance(swarm, Session) else swarm
    kind = ALGORITHMS.get(name)
    if kind is None:
        raise ConfigError(
            f"unknown algorithm {name!r}", key="algorithm", expected=", ".join(ALGORITHMS)
        )
    try:
        return kind(params, swarm, **options)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(
            f"{name}: {error}", key="algorithm", expected=f"the options of {kind.__name__}"
        ) from error
