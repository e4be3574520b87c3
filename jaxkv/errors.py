"""Errors of jaxkv. Every message names the value, the limit and the remedy."""


class JaxkvError(ValueError):
    """Base of every error that a user of jaxkv can cause."""


class SchemaError(JaxkvError):
    """A tool schema cannot be turned into a grammar; the message names the JSON path."""


class PolicyError(JaxkvError):
    """A policy is unknown, corrupt, or made for something else."""


class ModelError(JaxkvError):
    """A model cannot be found, fetched, verified or read."""


class RequestError(JaxkvError):
    """A single request is impossible; its neighbours in the batch are unaffected."""


class CapacityError(JaxkvError):
    """The KV state cannot hold what is asked of it."""


class EvaluationError(JaxkvError):
    """Evaluation data is missing, malformed or of an unknown kind."""


class KernelError(JaxkvError):
    """A GPU kernel was asked for that cannot run, or its configuration is impossible."""


class CacheError(JaxkvError):
    """A file of a cache folder cannot be read or written."""
