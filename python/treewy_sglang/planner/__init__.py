"""`treewy plan`: what a draft costs in memory, and how many requests fit beside it. Standard library only.

models    the dimensions of a model: built in, or from its config.json
capacity  bytes per request, running requests, the widest draft, as SGLang v0.5.17 and this package size their pools
report    the result as a table, as JSON and as a picture
command   the command line
"""

from .capacity import Draft, Plan, Server, plan
from .errors import PlanError
from .models import BUILT_IN, Model, from_config, load

__all__ = ["BUILT_IN", "Draft", "Model", "Plan", "PlanError", "Server", "from_config", "load", "plan"]
