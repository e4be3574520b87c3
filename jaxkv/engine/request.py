"""What a caller asks of the engine, and the checks that come before any work."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxkv.errors import RequestError


@dataclasses.dataclass(frozen=True)
class Request:
    """One generation.

    Exactly one of `messages` (a conversation, put through the tokenizer's chat template) and `prompt_ids` is given.
    `temperature` 0 is greedy; otherwise the nucleus of probability `top_p` is sampled with a key made from `seed` and
    the token's index, so that a request's tokens do not depend on the batch it runs in.

    `policy` is a policy of the request's own, for an engine whose policy gives each row its own (`PaskRows`).
    `abandon(token_ids)` is asked after every generated token; True ends the request as "abandoned".
    """

    messages: Sequence[Mapping[str, Any]] | None = None
    prompt_ids: Sequence[int] | None = None
    constraint: Any = None
    max_new_tokens: int = 160
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    request_id: str = "0"
    policy: Any = None
    abandon: Callable[[Sequence[int]], bool] | None = None


def prompt_of(request: Request, model: Any, policy: Any) -> list[int]:
    """The request's prompt tokens; RequestError, naming value, limit and remedy, if it cannot be served."""
    if (request.messages is None) == (request.prompt_ids is None):
        raise RequestError("a request has either messages or prompt_ids; give exactly one")
    if request.max_new_tokens < 1:
        raise RequestError(f"max_new_tokens is {request.max_new_tokens}; ask for at least 1")
    if not request.temperature >= 0:
        raise RequestError(f"temperature is {request.temperature}; it is 0 (greedy) or above")
    if not 0 < request.top_p <= 1:
        raise RequestError(f"top_p is {request.top_p}; it is above 0 and at most 1")
    if not 0 <= request.seed < 2**32:
        raise RequestError(f"seed is {request.seed}; it is a 32-bit unsigned integer")
    if policy.needs.tags:
        if request.constraint is None:
            raise RequestError(
                f"policy '{policy.name}' acts on structural tags, and the request has no constraint; "
                "give one (FunctionCalls) or use the policy 'full'"
            )
        if request.constraint.vocabulary != policy.vocabulary:
            raise RequestError(
                f"policy '{policy.name}' knows the tags of {policy.vocabulary.family}, and the constraint those of "
                f"{request.constraint.vocabulary.family}; use a policy made for that grammar"
            )
    vocabulary, context = model.config.vocab_size, model.config.context
    if request.messages is not None:
        ids = model.tokenizer.apply_chat_template(list(request.messages))
    else:
        ids = [int(i) for i in request.prompt_ids or ()]
        outside = next((i for i in ids if not 0 <= i < vocabulary), None)
        if outside is not None:
            raise RequestError(f"prompt token {outside} is outside the vocabulary of {vocabulary:,}")
    if not ids:
        raise RequestError("the prompt is empty; give at least one token")
    if len(ids) >= context:
        raise RequestError(
            f"prompt of {len(ids):,} tokens exceeds the model's context of {context:,} (one is for the answer); "
            "shorten it or use a model with a longer context"
        )
    return ids
