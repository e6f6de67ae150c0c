"""Careful change and the way back: gradual rollouts with a guard, and the degrade switch. Start with `Rollouts`."""

from vera.rollout.arms import Arm, arm_of, position
from vera.rollout.breaker import Bounds, Breaker, BreakerSettings, BreakerState, Override, Signals
from vera.rollout.controller import Choice, Rollouts
from vera.rollout.guard import Breach, Decision, Limits, Verdict, judge
from vera.rollout.plan import Plan, Step
from vera.rollout.rollout import Cause, Rollout, State
from vera.rollout.stats import ArmStats, Audit, Outcome, Shadow
from vera.rollout.switch import DegradeSwitch, Flip

__all__ = [
    "Arm",
    "ArmStats",
    "Audit",
    "Bounds",
    "Breach",
    "Breaker",
    "BreakerSettings",
    "BreakerState",
    "Cause",
    "Choice",
    "Decision",
    "DegradeSwitch",
    "Flip",
    "Limits",
    "Outcome",
    "Override",
    "Plan",
    "Rollout",
    "Rollouts",
    "Shadow",
    "Signals",
    "State",
    "Step",
    "Verdict",
    "arm_of",
    "judge",
    "position",
]
