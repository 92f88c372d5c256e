"""The error of the planner: every message names the argument, its value, and what is allowed."""


class PlanError(ValueError):
    """Something was asked for that cannot be planned; the command ends with exit code 2."""


def refuse(argument: str, value: object, allowed: str) -> PlanError:
    return PlanError(f"{argument} is {value}; allowed: {allowed}")
