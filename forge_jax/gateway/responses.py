"""OpenAI's Responses protocol: /v1/responses, one answer as an object.

A body and the session's stored responses flow in; items of a conversation flow out. Token
data goes beside the items, never into them: clients send back what they find there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from forge_jax.gateway.ask import Ask, common_fields
from forge_jax.gateway.chat_messages import template_variables
from forge_jax.gateway.completion import Completion
from forge_jax.gateway.errors import ApiError
from forge_jax.gateway.fields import flag, integer, mapping, sequence, text, wrong
from forge_jax.gateway.messages import Conversation, Message, Piece, Thought, ToolCall
from forge_jax.gateway.openai_parts import token_data, told_logprobs, usage_of
from forge_jax.gateway.response_items import read_input, read_messages
from forge_jax.gateway.response_tools import Offered, read_tools, told_tools
from forge_jax.gateway.signing import sealed
from forge_jax.gateway.stored import Given, Item, Stored, StoredResponses, response_id
from forge_jax.gateway.structure import ANY_OBJECT, TEXT_FORMAT, schema_grammar
from forge_jax.gateway.wire import Context
from forge_jax.types import Finish

MOST_TOKENS = 2**31 - 1
LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
ELSEWHERE = ("n", "prompt_logprobs", "stream_options")  # fields of chat alone
ABSENT = ("conversation", "prompt")  # that would stand for text nobody here has


def parse(body: Mapping[str, Any], stored: StoredResponses) -> Ask:
    """What a body asks for. Raises ApiError(400), and 404 for ids that are not stored."""
    for name in ABSENT:
        if body.get(name) is not None:
            raise ApiError(400, f"{name} is not supported here: send its items", param=name)
    offered = read_tools(body)
    items, referred = read_input(body, stored)
    given = Given(items=items, previous=_previous(body, stored), referred_bytes=referred)
    common = common_fields({k: v for k, v in body.items() if k not in ELSEWHERE})
    top = integer(body, "top_logprobs", 0, 20) or 0
    return Ask(
        source=_conversation(body, given, offered),
        max_tokens=integer(body, "max_output_tokens", 1, MOST_TOKENS),
        logprobs=top > 0 or LOGPROBS in sequence(body, "include"),
        top_logprobs=top,
        seal_thoughts=SEALED in sequence(body, "include"),
        told=_told(body),
        names={shown: name for name, shown in offered.names.items()},
        given=None if body.get("store") is not None and not flag(body, "store") else given,
        **{**common, "answer": _format(body, common["answer"])},
    )


def _previous(body: Mapping[str, Any], stored: StoredResponses) -> Stored | None:
    name = text(body, "previous_response_id")
    previous = None if name is None else stored.response(name)
    if name is not None and previous is None:
        raise ApiError(
            404,
            f"previous_response_id={name!r} is no stored response of this session",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return previous


def _conversation(body: Mapping[str, Any], given: Given, offered: Offered) -> Conversation:
    messages = read_messages(given.before(), given.items, offered.names)
    instructions = text(body, "instructions")
    if instructions:
        messages = (Message(role="system", content=instructions), *messages)
    if not messages:
        raise ApiError(400, "input must hold at least one item", param="input")
    return Conversation(
        messages=messages,
        tools=offered.tools,
        variables=template_variables(body),
        must_call=offered.must_call,
        parallel=_parallel(body),
    )


def _parallel(body: Mapping[str, Any]) -> bool:
    return body.get("parallel_tool_calls") is None or flag(body, "parallel_tool_calls")


def _format(body: Mapping[str, Any], beside: Any) -> Any:
    """The grammar of `text.format`, else the one that is asked for beside it."""
    wanted = mapping(mapping(body, "text"), "format", "text.")
    kind = text(wanted, "type", f"{TEXT_FORMAT}.") or "text"
    if kind == "text":
        return beside
    if beside is not None:
        message = f"{TEXT_FORMAT} does not go with {beside.source}"
        raise ApiError(400, message, param=TEXT_FORMAT)
    if kind == "json_object":
        return schema_grammar(ANY_OBJECT, TEXT_FORMAT)
    if kind != "json_schema":
        raise wrong(f"{TEXT_FORMAT}.type", kind, "text, json_object or json_schema")
    if wanted.get("schema") is None:
        raise wrong(f"{TEXT_FORMAT}.schema", None, "a JSON schema")
    return schema_grammar(mapping(wanted, "schema", f"{TEXT_FORMAT}."), TEXT_FORMAT)


def _told(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the answer says of the request."""
    form = mapping(body, "text")
    return {
        "instructions": text(body, "instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": mapping(body, "metadata"),
        "parallel_tool_calls": _parallel(body),
        "previous_response_id": body.get("previous_response_id"),
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": None, "summary": None, **mapping(body, "reasoning")},
        "store": body.get("store") is not False,
        "text": {**form, "format": form.get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": told_tools(body),
        "top_logprobs": body.get("top_logprobs") or 0,
        "user": body.get("user"),
    }


def answer(context: Context) -> Mapping[str, Any]:
    """The response object of a finished call."""
    [completion] = context.call.completions
    cut = completion.finish is Finish.LENGTH
    body = {
        **head(context, "incomplete" if cut else "completed"),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "completed_at": context.created + int(max(0, completion.ended - context.call.arrived)),
        "output": output_items(context, completion),
        "usage": _usage(context),
    }
    if context.ask.tell_ids:
        body["prompt_token_ids"] = context.call.prompt.ids.tolist()
        body |= token_data(completion.output, completion.versions)
    return body


def head(context: Context, status: str) -> dict[str, Any]:
    """A response object without an answer."""
    sampling = context.call.completions[0].request.sampling
    return {
        "id": response_id(context.call.id),
        "object": "response",
        "created_at": context.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": context.model,
        "output": [],
        "service_tier": "default",
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        **context.ask.told,
    }


def output_items(context: Context, completion: Completion) -> list[Item]:
    """The reply as items, in order; log-probs of all that was sampled stand at its first text."""
    grouped = _grouped(completion)
    cut = completion.finish is Finish.LENGTH
    logprobs = told_logprobs(context, completion.output, completion.logprobs, completion.tops)
    items: list[Item] = []
    for i, piece in enumerate(grouped):
        if isinstance(piece, Thought):
            items.append(thought_item(context, i, piece.text, "completed"))
        elif isinstance(piece, str):
            status = "incomplete" if cut and i == len(grouped) - 1 else "completed"
            items.append(message_item(context, i, piece, status, logprobs))
            logprobs = []
        else:
            items.append(call_item(context, i, piece, piece.arguments, "completed"))
    return items


def _grouped(completion: Completion) -> list[Piece]:
    """The parts of a reply, its thought first, neighbouring texts as one; never without an
    answer."""
    thought = completion.message.thought
    grouped: list[Piece] = []
    for piece in completion.pieces:
        if isinstance(piece, str) and grouped and isinstance(grouped[-1], str):
            grouped[-1] += piece
        elif not isinstance(piece, Thought):
            grouped.append(piece)
    return [*([Thought(thought)] if thought else []), *(grouped or [""])]


def thought_item(context: Context, index: int, words: str | None, status: str) -> dict[str, Any]:
    """Item `index` of the output, a thought; `words` is None where it only begins."""
    seal = context.ask.seal_thoughts and words is not None
    return {
        "id": f"rs_{context.call.id}_{index}",
        "type": "reasoning",
        "status": status,
        "summary": [],
        "content": [] if words is None else [thought_part(words)],
        "encrypted_content": sealed(words or "") if seal else None,
    }


def thought_part(words: str) -> dict[str, Any]:
    """The content of a thought."""
    return {"type": "reasoning_text", "text": words}


def message_item(
    context: Context, index: int, words: str | None, status: str, logprobs: Sequence[Any] = ()
) -> dict[str, Any]:
    """Item `index` of the output, a message; `words` is None where it only begins."""
    return {
        "id": f"msg_{context.call.id}_{index}",
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": [] if words is None else [text_part(words, logprobs)],
    }


def text_part(words: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """The content of a message."""
    return {"type": "output_text", "text": words, "annotations": [], "logprobs": list(logprobs)}


def call_item(
    context: Context, index: int, call: ToolCall, arguments: str, status: str
) -> dict[str, Any]:
    """Item `index` of the output, a call of a function."""
    space, name = context.ask.names.get(call.name, ("", call.name))
    item = {
        "id": f"fc_{context.call.id}_{index}",
        "type": "function_call",
        "status": status,
        "call_id": call.id,
        "name": name,
        "arguments": arguments,
    }
    return {**item, "namespace": space} if space else item


def _usage(context: Context) -> Mapping[str, Any]:
    usage = usage_of(context.call)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
