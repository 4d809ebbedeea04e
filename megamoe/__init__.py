"""megamoe: mixture-of-experts layers for PyTorch that train and serve with expert parallelism."""

from megamoe.config import MoEConfig, RouterConfig
from megamoe.errors import ExchangeError, MegaMoEError, MegaMoETypeError, MegaMoEValueError
from megamoe.layers.balance import set_aux_loss_scale, update_expert_biases
from megamoe.layers.decode import DecodeRunner
from megamoe.layers.experts import Experts
from megamoe.layers.fused import mega_moe
from megamoe.layers.moe import MoE
from megamoe.layers.parallel import average_gradients, clip_grad_norm_, expert_parameters
from megamoe.layers.rebalance import expert_load, rebalance
from megamoe.layers.router import Router, save_routing
from megamoe.layers.shared import SharedExperts
from megamoe.placement import ExpertPlacement
from megamoe.placement_search import balance_placement
from megamoe.types import Routing

__version__ = "0.1.0"

__all__ = [
    "DecodeRunner",
    "ExchangeError",
    "ExpertPlacement",
    "Experts",
    "MegaMoEError",
    "MegaMoETypeError",
    "MegaMoEValueError",
    "MoE",
    "MoEConfig",
    "Router",
    "RouterConfig",
    "Routing",
    "SharedExperts",
    "average_gradients",
    "balance_placement",
    "clip_grad_norm_",
    "expert_load",
    "expert_parameters",
    "mega_moe",
    "rebalance",
    "save_routing",
    "set_aux_loss_scale",
    "update_expert_biases",
]
