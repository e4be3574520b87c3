"""KV policies: how long, and how precisely, each token's keys and values are kept."""

from jaxkv.policies.base import Needs, Policy
from jaxkv.policies.full import FullKV
from jaxkv.policies.registry import load_policy, policy_names

__all__ = ["FullKV", "Needs", "Policy", "load_policy", "policy_names"]
