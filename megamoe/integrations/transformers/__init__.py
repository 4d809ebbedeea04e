"""Experts of Hugging Face transformers models on megamoe: on one rank, or spread over an expert-parallel group.

register()
model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="megamoe")
enable_expert_parallel(model, group)  # under torchrun
"""

from megamoe.integrations.transformers.experts import experts_forward, register
from megamoe.integrations.transformers.joining import join
from megamoe.integrations.transformers.parallel import enable_expert_parallel

__all__ = ["enable_expert_parallel", "experts_forward", "join", "register"]
